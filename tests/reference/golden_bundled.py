"""The golden data of the bundled voice pack, and the codes that `warble doctor` looks for.

    cd tests
    python -m reference.golden_bundled ../warble_mlx/bundled

To be run again for another pack. All of it comes from PyTorch: greedy, float32, one sentence in
each of three voices with its waveform, and the codes of a clip; then `self_test.json` in the pack.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

from reference.dump import ReferenceEngine, open_engine
from warble_mlx.doctor import TEST_TEXT
from warble_mlx.voices import read_voices

OUT = Path(__file__).resolve().parent.parent / "golden" / "bundled"
MOST_FRAMES = 300
CLIP_FRAMES = 22
SENTENCES = {
    "birch.npz": (1, "The birch canoe slid across the quiet lake at dawn."),
    "water.npz": (3, "Can I have a glass of water, please?"),
    "museum.npz": (5, "The museum closes at 5:30 on Sunday."),
}


def spoken(engine: ReferenceEngine, token: str, text: str) -> tuple[Tensor, Tensor]:
    """Prompt ids [T] and greedy codes [10, F]; exits if the sentence does not end."""
    columns = engine.prompt(token + text, None, None)
    result, _ = engine.run([columns], MOST_FRAMES, None, None)
    if not result.finished[0]:
        raise SystemExit(f"no end within {MOST_FRAMES} frames: {text}")
    return columns[0], result.codes[0, :, : result.lengths[0]]


def doctor_sentence(engine: ReferenceEngine, folder: Path) -> dict[str, Any]:
    """What `warble doctor` reads: text, voice and codes [10][F]."""
    voice = read_voices(folder).default_voice
    _, codes = spoken(engine, voice.token if voice else "", TEST_TEXT)
    return {"text": TEST_TEXT, "voice": voice.name if voice else None, "codes": codes.tolist()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    folder = parser.parse_args().bundle
    engine = open_engine(folder)
    tokens = {voice.id: voice.token for voice in read_voices(folder).voices}
    cases = []
    for file, (voice, text) in SENTENCES.items():
        prompt, codes = spoken(engine, tokens[voice], text)
        samples = engine.decode(codes).wave
        np.savez_compressed(
            OUT / file,
            prompt_ids=prompt.numpy().astype(np.int32),
            codes=codes.numpy().astype(np.int16),
            waveform=samples.numpy(),
        )
        cases.append({"file": file, "text": text, "voice": voice})
        print(file, tuple(codes.shape), f"{len(samples) / engine.config.codec_sample_rate:.2f} s")
    (OUT / "golden.json").write_text(json.dumps(cases, indent=1) + "\n")

    clip, _ = soundfile.read(OUT.parent / "speech_44k.wav", dtype="float32")
    clip = clip[: CLIP_FRAMES * engine.config.codec_frame_size]
    found = engine.encode(torch.from_numpy(clip))
    assert found is not None
    codes, margins = found
    print(f"clip: smallest margin {float(margins.min()):.2e}")
    np.savez_compressed(OUT / "encode.npz", waveform=clip, codes=codes.numpy().astype(np.int16))
    (folder / "self_test.json").write_text(json.dumps(doctor_sentence(engine, folder)) + "\n")


if __name__ == "__main__":
    main()
