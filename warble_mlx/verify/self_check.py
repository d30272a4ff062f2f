"""What can be said about a bundle without a dump: does it agree with itself?

The RoPE table against its closed form, finite scores, the cached step against one pass over
everything, the compiled step against the plain one, streamed against whole decoding. That it is
the *same* model as its source only a dump can show.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from warble_mlx.engine import Engine, Request
from warble_mlx.prompt import Prompt
from warble_mlx.verify.choices import GREEDY
from warble_mlx.verify.codec_ladder import streamed_against_whole
from warble_mlx.verify.compare import Array, Limits, Outcome, values
from warble_mlx.verify.ladder import Rung
from warble_mlx.verify.passes import generated
from warble_mlx.verify.subject import Subject

TEXT = "Is this the same model?"
FRAMES = 24
# A table computed in float64 rounds to another bfloat16 value in 0.15 % of the entries.
ROPE_SHARE = 0.01


class SelfRungs:
    """One subject against itself."""

    def __init__(self, subject: Subject, limits: Limits) -> None:
        self._subject, self._limits = subject, limits
        self._frames: Array = np.zeros((11, 0), np.int32)  # semantic index, then ten codes

    def rungs(self) -> Iterator[Rung]:
        """In the order in which they are climbed."""
        yield Rung("rope closed form", self.rope)
        yield Rung("cached steps", self.cached)
        if self._subject.compiled:
            yield Rung("compiled step", self.compiled)
        if self._subject.decoder is not None:
            yield Rung("waveform streamed", self.streamed)

    def rope(self) -> list[Outcome]:
        """Cosines and sines computed in float64 and rounded: at most one bfloat16 step apart, and
        that seldom."""
        slow = self._subject.config.slow
        table = np.array(self._subject.model._slow_rope)
        exponents = np.arange(0, slow.head_dim, 2) / slow.head_dim
        angles = np.outer(np.arange(len(table)), slow.rope_base**-exponents)
        closed = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        # float32 angles of some thousand radians are off by 1e-4, a step near 1 is 4e-3 wide.
        off = np.abs(table - closed) > np.abs(closed) * 2.0**-8 + 2e-4
        share = float(off.mean())
        return [
            Outcome(
                rung="rope closed form",
                state="failed" if share > ROPE_SHARE else "passed",
                worst=share,
                limit=ROPE_SHARE,
                compared=off.size,
                message=f"{share:.1%} of the table is no cosine or sine"
                if share > ROPE_SHARE
                else "",
            )
        ]

    def cached(self) -> list[Outcome]:
        """Hidden states of frame steps with caches against one pass over prompt and frames."""
        subject, model = self._subject, self._subject.model
        prompt = self._prompt()
        state, stepped, frames = subject.engine.prefill(prompt), [], []
        for _ in range(FRAMES):
            stepped.append(np.array(state.hidden[0].astype(mx.float32)))
            emitted, state = subject.engine.frame_step(state, None, None)
            frames.append(np.array(emitted)[0])
            if frames[-1][0] == subject.config.codebook_size:
                frames.pop()
                break
        self._frames = np.array(frames, np.int32).reshape(-1, 11).T
        ids = np.concatenate(
            [self._frames[:1] + subject.config.semantic_begin_id, self._frames[1:]]
        )
        columns = np.concatenate([prompt.columns, ids], axis=1)
        zero, hole = mx.zeros((1,), mx.int32), mx.zeros((1, 2), mx.int32)
        caches = model.empty_caches(1, columns.shape[1])
        whole, _ = model.advance(model.embed(mx.array(columns)[None]), zero, hole, caches)
        first = prompt.columns.shape[1] - 1
        wanted = np.array(whole[0, first : first + len(stepped)].astype(mx.float32))
        limits, axes = self._limits, "step, channel"
        got = np.stack(stepped)
        return [
            values("cached steps", got, wanted, limits.hidden, relative=limits.relative, axes=axes)
        ]

    def compiled(self) -> list[Outcome]:
        """The compiled step's codes against the plain one's."""
        request = Request(self._prompt(), FRAMES, GREEDY, 0)
        plain = Engine(self._subject.model, compiled=False)
        ((wanted, _),) = generated(plain, [request], 1)
        ((got, _),) = generated(self._subject.engine, [request], 1)
        if not self._limits.relative:
            return [values("compiled step", got, wanted, 0, relative=False, axes="book, frame")]
        common = min(got.shape[1], wanted.shape[1])
        share = float((got[:, :common] == wanted[:, :common]).mean()) if common else 1.0
        message = f"{share:.1%} of the codes are equal"
        return [Outcome(rung="compiled step", state="passed", agreement=share, message=message)]

    def streamed(self) -> list[Outcome]:
        """Decoding the frames of `cached` in chunks against decoding them whole."""
        codes = self._frames[1:]
        if not codes.size:
            return [Outcome(rung="waveform streamed", state="skipped", message="no frames")]
        return [streamed_against_whole(self._subject, mx.array(codes)[None])]

    def _prompt(self) -> Prompt:
        if self._subject.prompts is not None:
            return self._subject.prompts.build(TEXT)
        columns = np.zeros((11, 40), np.int32)
        columns[0] = np.arange(40)
        return Prompt(columns[:, :7], columns[:, 7:])
