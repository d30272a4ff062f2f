"""The bundled voice pack speaks the golden data of the checkpoint it was converted from.

Those numbers were made in PyTorch, float32: prompt, greedy codes and waveform of three sentences,
and the codes of one clip.
"""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from golden_data import FOLDER, assert_close, assert_same_codes

import warble_mlx
from warble_mlx import Warble

GOLDEN = FOLDER / "bundled"
CASES = json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load(dtype="float32")


@pytest.mark.parametrize("case", CASES, ids=[c["file"] for c in CASES])
def test_text_to_samples(warble: Warble, case: dict[str, object]) -> None:
    golden = np.load(GOLDEN / str(case["file"]))
    spoken = warble.say(str(case["text"]), voice=int(str(case["voice"])), greedy=True)
    assert_same_codes(spoken.codes, golden["codes"].astype(np.int32), str(case["file"]))
    assert_close(spoken.samples, golden["waveform"], 1e-5, str(case["file"]))
    assert spoken.finish_reason == "stop"


@pytest.mark.parametrize("case", CASES, ids=[c["file"] for c in CASES])
def test_prompt(warble: Warble, case: dict[str, object]) -> None:
    golden = np.load(GOLDEN / str(case["file"]))
    speaker = f"<|speaker:{case['voice']}|>"
    columns = warble._prompts.build(str(case["text"]), speaker=speaker).columns
    assert columns[0].tolist() == golden["prompt_ids"].tolist()


def test_a_clip_to_codes(warble: Warble) -> None:
    from warble_mlx.codec import CodecEncoder
    from warble_mlx.weights import ENCODER_FILE, load_strictly

    golden = np.load(GOLDEN / "encode.npz")
    encoder = CodecEncoder(warble.config)
    load_strictly(encoder, warble.folder / ENCODER_FILE, mx.float32, {})
    codes, frames = encoder.encode(mx.array(golden["waveform"])[None], warble._decoder.quantizer)
    assert_same_codes(np.array(codes[0, :, : frames[0]]), golden["codes"].astype(np.int32), "clip")
