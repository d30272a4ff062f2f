"""Two hundred utterances of different lengths and voices need no more memory than the first few."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from codec_models import load_decoder, write_small_codec

from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import KEPT_PREFIXES, Engine, Request, Sampling
from warble_mlx.prompt import Prompt

pytestmark = pytest.mark.usefixtures("on_the_cpu")

UTTERANCES, QUARTER = 200, 50
ROWS = 2


def request(number: int, sizes: random.Random) -> Request:
    """A voice, a text and lengths that are its own."""
    prefix = np.zeros((11, 20 + number % 24), np.int32)
    prefix[0] = number
    target = np.zeros((11, sizes.randint(1, 100)), np.int32)
    target[0] = number
    return Request(Prompt(prefix, target), sizes.randint(1, 10), Sampling(), number)


def test_peak_stays_flat(tiny_dual_ar: DualAR, tmp_path: Path) -> None:
    decoder = load_decoder(write_small_codec(tmp_path))
    engine = Engine(tiny_dual_ar, compiled=False)
    sizes = random.Random(3)
    # The longest of all comes first, so that later quarters have nothing that is new to them.
    longest = Request(Prompt(*(np.zeros((11, n), np.int32) for n in (44, 100))), 10, Sampling(), 0)
    requests = [longest, longest, *(request(n, sizes) for n in range(2, UTTERANCES))]
    peaks, left = [], []
    for begin in range(0, UTTERANCES, QUARTER):
        mx.reset_peak_memory()
        spoken: dict[int, list[np.ndarray]] = {}
        for emission in engine.generate(requests[begin : begin + QUARTER], rows=ROWS):
            if emission.codes is not None:
                spoken.setdefault(emission.request, []).append(emission.codes % 32)
        for frames in spoken.values():
            mx.eval(decoder.decode(mx.array(np.stack(frames, axis=1))[None]))
        assert len(spoken) >= QUARTER - 5  # a random model may say nothing now and then
        peaks.append(mx.get_peak_memory())
        left.append(mx.get_active_memory() + mx.get_cache_memory())
    assert max(peaks[1:]) <= 1.02 * peaks[0]
    assert max(left[1:]) <= 1.1 * left[0]


def test_what_is_kept_can_be_released(tiny_dual_ar: DualAR) -> None:
    engine = Engine(tiny_dual_ar, compiled=False)
    mx.clear_cache()
    before = mx.get_active_memory()
    sizes = random.Random(4)
    for number in range(3 * KEPT_PREFIXES):
        list(engine.generate([request(number, sizes)]))
    slow = tiny_dual_ar.config.slow
    position = 2 * slow.n_layer * slow.n_kv_head * slow.head_dim * 4  # keys and values, float32
    kept = mx.get_active_memory() - before
    page = 16_384  # Apple's; each layer's cache begins one
    assert 0 < kept <= KEPT_PREFIXES * (44 * position + slow.n_layer * page)
    engine.release()
    assert mx.get_active_memory() - before == pytest.approx(0, abs=4096)
    assert mx.get_cache_memory() == 0
