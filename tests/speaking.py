"""A model that speaks at once: random codes, and bursts of noise that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

import warble_mlx
from warble_mlx import Warble
from warble_mlx.engine import Emission, Request

Hook = Callable[[int, int, Request], None]


class QuickDecoder:
    """Noise from the codes, frame by frame; as loud as the first code is high."""

    def __init__(self, quantizer: object) -> None:
        self.quantizer = quantizer  # which reading a clip needs

    def initial_state(self, _batch: int) -> int:
        return 0

    def step(self, codes: mx.array, state: int) -> tuple[mx.array, int]:
        frames = np.array(codes[0]).T
        noise = [np.random.default_rng(frame).normal(size=2048) for frame in frames]
        levels = 10.0 ** (-3 + frames[:, :1] / 250)
        samples = np.clip(np.stack(noise) * levels, -0.9, 0.9).astype(np.float32)
        return mx.array(samples.reshape(1, -1)), state + len(frames)


def quick_frames(request: Request, number: int = 0, hook: Hook | None = None) -> Iterator[Emission]:
    """Random codes that follow from the request's seed, and an end."""
    rng = np.random.default_rng(request.seed)
    wanted = request.prompt.target.shape[1]  # about a character per column
    for frame in range(min(wanted, request.max_frames)):
        if hook:
            hook(number, frame, request)
        yield Emission(number, rng.integers(0, 512, 10).astype(np.int32), None)
    yield Emission(number, None, "stop" if wanted <= request.max_frames else "length")


class QuickBatch:
    """Stands for `warble_mlx.engine.Batch`: the same frames for many requests at once."""

    step_s = 0.001

    def __init__(self, _engine: object, rows: int, *, elastic: bool) -> None:
        assert elastic
        self._most = rows
        self._rows: dict[int, Iterator[Emission]] = {}

    def join(self, number: int, request: Request) -> None:
        assert len(self._rows) < self._most
        self._rows[number] = quick_frames(request, number)

    def leave(self, number: int) -> None:
        self._rows.pop(number, None)

    def step(self) -> Iterator[Emission]:
        time.sleep(self.step_s)
        for number, frames in list(self._rows.items()):
            if number in self._rows:
                emission = next(frames)
                if emission.finish_reason:
                    self.leave(number)
                yield emission


def quick_warble(hook: Hook | None = None) -> tuple[Warble, list[Request]]:
    """The bundled pack, but codes follow from the seed and samples from codes; and its requests.

    hook(request, frame, …) is called before every frame, with the number of both; it may raise.
    """
    warble = warble_mlx.load()
    asked: list[Request] = []

    def generate(requests: Sequence[Request], rows: int = 1) -> Iterator[Emission]:
        (request,) = requests
        asked.append(request)
        for emission in quick_frames(request, len(asked) - 1, hook):
            yield emission._replace(request=0)

    warble.engine.generate = generate  # type: ignore[method-assign,assignment]
    warble._decoder = QuickDecoder(warble._decoder.quantizer)  # type: ignore[assignment]
    return warble, asked
