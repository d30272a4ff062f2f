"""A model that speaks at once: random codes, and bursts of noise that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

import warble_mlx
from warble_mlx import Warble
from warble_mlx.engine import Emission, Request

Hook = Callable[[int, int, Request], None]


class QuickDecoder:
    """Noise from the codes, frame by frame; as loud as the first code is high."""

    def initial_state(self, _batch: int) -> int:
        return 0

    def step(self, codes: mx.array, state: int) -> tuple[mx.array, int]:
        frames = np.array(codes[0]).T
        noise = [np.random.default_rng(frame).normal(size=2048) for frame in frames]
        levels = 10.0 ** (-3 + frames[:, :1] / 250)
        samples = np.clip(np.stack(noise) * levels, -0.9, 0.9).astype(np.float32)
        return mx.array(samples.reshape(1, -1)), state + len(frames)


def quick_warble(hook: Hook | None = None) -> tuple[Warble, list[Request]]:
    """The bundled pack, but codes follow from the seed and samples from codes; and its requests.

    hook(request, frame, …) is called before every frame, with the number of both; it may raise.
    """
    warble = warble_mlx.load()
    asked: list[Request] = []

    def generate(requests: Sequence[Request], rows: int = 1) -> Iterator[Emission]:
        (request,) = requests
        asked.append(request)
        number = len(asked) - 1
        rng = np.random.default_rng(request.seed)
        wanted = request.prompt.target.shape[1]  # about a character per column
        for frame in range(min(wanted, request.max_frames)):
            if hook:
                hook(number, frame, request)
            yield Emission(0, rng.integers(0, 512, 10).astype(np.int32), None)
        yield Emission(0, None, "stop" if wanted <= request.max_frames else "length")

    warble.engine.generate = generate  # type: ignore[method-assign,assignment]
    warble._decoder = QuickDecoder()  # type: ignore[assignment]
    return warble, asked
