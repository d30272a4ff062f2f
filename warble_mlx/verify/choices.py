"""The rungs of the transformers that compare choices: greedy codes, sampled codes.

A code that differs is looked at in the dump's own scores. If it is a tie, it is counted, and the
utterance is continued behind it from the dump's frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.engine import Request, Sampling, State
from warble_mlx.sampling import Settings
from warble_mlx.verify.compare import Array, Limits, Outcome, merged, race_margins
from warble_mlx.verify.dump import Case, Sampled
from warble_mlx.verify.ladder import Rung
from warble_mlx.verify.passes import Passes, as_prompt, generated

GREEDY = Sampling(temperature=0)


class Mismatch(NamedTuple):
    """The first choice that differs: where, both candidates (semantic C is EOS), both frames."""

    frame: int
    book: int
    got: int
    wanted: int
    row_got: list[int]
    row_wanted: list[int]


class ChoiceRungs:
    """Codes of whole utterances. `rows` greedy ones are generated together."""

    def __init__(self, passes: Passes, limits: Limits, rows: int = 1) -> None:
        self._passes, self._limits, self._rows = passes, limits, rows
        self._dump, self._subject = passes.dump, passes.subject
        self._eos = passes.subject.config.codebook_size

    def rungs(self) -> Iterator[Rung]:
        """In the order in which they are climbed."""
        yield Rung("greedy codes", self.greedy_codes)
        yield Rung("sampled codes", self.sampled_codes)

    def greedy_codes(self) -> list[Outcome]:
        """Utterances generated as the product does; or how often choices agree, where the limits
        are relative."""
        cases = [case for case in self._dump.info.cases if case.sampled is None]
        if self._limits.relative:
            return [self._agreement(cases)]
        free = generated(self._subject.engine, [self._request(c) for c in cases], self._rows)
        parts = [self._followed(c, *run) for c, run in zip(cases, free, strict=True)]
        return [merged("greedy codes", parts)]

    def sampled_codes(self) -> list[Outcome]:
        """Utterances sampled with the dump's uniforms, frame by frame."""
        cases = [case for case in self._dump.info.cases if case.sampled is not None]
        if self._limits.relative or not cases:
            why = "compared in float32 only" if self._limits.relative else "the dump has none"
            return [Outcome(rung="sampled codes", state="skipped", message=why)]
        return [merged("sampled codes", [self._sampled_case(case) for case in cases])]

    # ------------------------------------------------------------------ greedy

    def _request(self, case: Case, start: int = 0) -> Request:
        """To go on behind the dump's first `start` frames."""
        prompt = as_prompt(self._passes.columns(case, start))
        return Request(prompt, len(self._passes.choices(case)) - start, GREEDY, 0)

    def _followed(self, case: Case, codes: Array, ended: bool) -> Outcome:
        start, ties, steps = 0, 0, len(self._passes.choices(case))
        while (found := self._mismatch(case, start, steps, codes, ended)) is not None:
            margin = self._margin(case, found)
            if margin >= self._limits.tie:
                return self._differs("greedy codes", case, found, margin, ties)
            ties += 1
            start = found.frame + 1
            if start == steps:
                break
            ((codes, ended),) = generated(self._subject.engine, [self._request(case, start)], 1)
        return self._equal("greedy codes", steps, ties)

    def _agreement(self, cases: list[Case]) -> Outcome:
        """Share of equal choices, given the dump's history; and how far a free run keeps up."""
        equal = total = 0
        for case in cases:
            codes = self._passes.codes(case)
            frames = codes.shape[1]
            hidden, normed = self._passes.own_hidden(case)
            semantic = np.array(self._passes.model.semantic_logits(normed)).argmax(axis=-1)
            equal += int((semantic == self._passes.choices(case)).sum())
            total += len(semantic)
            if frames:
                entry = normed if self._subject.config.norm_fastlayer_input else hidden
                scores = self._passes.fast_scores(entry[:frames], codes)
                own = np.array(scores).argmax(axis=-1)
                equal += int((own == codes[1:].T).sum())
                total += own.size
        share = equal / max(1, total)
        short = share < self._limits.agreement
        return Outcome(
            rung="greedy codes",
            state="failed" if short else "passed",
            compared=total,
            agreement=share,
            message=(
                f"{share:.1%} of {total} choices agree, given the dump's history; at least"
                f" {self._limits.agreement:.0%} must"
                if short
                else self._free_run(cases)
            ),
        )

    def _free_run(self, cases: list[Case]) -> str:
        left = []
        free = generated(self._subject.engine, [self._request(c) for c in cases], self._rows)
        for case, (codes, ended) in zip(cases, free, strict=True):
            steps = len(self._passes.choices(case))
            found = self._mismatch(case, 0, steps, codes, ended)
            left.append(f"{case.name} {steps if found is None else found.frame} of {steps}")
        return f"equal from the start in a free run: {', '.join(left)}"

    # ------------------------------------------------------------------ sampled

    def _sampled_case(self, case: Case) -> Outcome:
        assert case.sampled is not None
        settings = Settings(
            mx.array([case.sampled.top_k], dtype=mx.int32),
            mx.array([case.sampled.top_p]),
            mx.array([case.sampled.temperature]),
        )
        engine, ties = self._subject.engine, 0
        state = engine.prefill(as_prompt(self._passes.columns(case)))
        steps = len(self._passes.choices(case))
        for frame in range(steps):
            noise = (
                mx.array(self._dump[f"{case.name}.uniforms.semantic"][frame])[:, None],
                mx.array(self._dump[f"{case.name}.uniforms.codes"][frame])[:, None],
            )
            emitted, state = engine.frame_step(state, settings, noise)
            row = np.array(emitted)[0]
            ended = bool(row[0] == self._eos)
            codes = row[1:, None][:, : 0 if ended else 1]
            found = self._mismatch(case, frame, frame + 1, codes, ended)
            if found is None:
                continue
            margin = self._margin(case, found)
            if margin >= self._limits.tie:
                return self._differs("sampled codes", case, found, margin, ties)
            ties += 1
            if frame + 1 < steps:
                state = self._behind(case, frame + 1)
        return self._equal("sampled codes", steps, ties)

    def _behind(self, case: Case, frames: int) -> State:
        """The state after the dump's first frames."""
        window = self._window(case, frames)
        state = self._subject.engine.prefill(as_prompt(self._passes.columns(case, frames)))
        return state._replace(
            frame=mx.array([frames], dtype=mx.int32), recent=mx.array([window], dtype=mx.int32)
        )

    def _window(self, case: Case, frames: int) -> list[int]:
        """The repetition window after the dump's first frames, of which the very first is never
        recorded; -1 is nothing."""
        width = self._subject.config.ras_window_size
        emitted: list[int] = self._passes.codes(case)[0, 1:frames].tolist()
        return ([-1] * width + emitted)[len(emitted) :]

    # ------------------------------------------------------------------ differences

    def _mismatch(
        self, case: Case, start: int, stop: int, codes: Array, ended: bool
    ) -> Mismatch | None:
        """The first difference between the dump's steps start…stop - 1 and our codes [10, n], which
        were `ended` by EOS or not."""
        wanted = self._passes.codes(case)[:, start:stop]
        common = min(codes.shape[1], wanted.shape[1])
        wrong = np.flatnonzero((codes[:, :common] != wanted[:, :common]).any(axis=0))
        at = int(wrong[0]) if wrong.size else common
        got, want = codes[:, at : at + 1].ravel().tolist(), wanted[:, at : at + 1].ravel().tolist()
        if got and want:
            book = next(b for b in range(len(got)) if got[b] != want[b])
            return Mismatch(start + at, book, got[book], want[book], got, want)
        if want:
            return Mismatch(start + at, 0, self._eos, want[0], got, want)
        if got:
            return Mismatch(start + at, 0, got[0], self._eos, got, want)
        assert ended == (case.finished and stop == len(self._passes.choices(case)))
        return None

    def _margin(self, case: Case, found: Mismatch) -> float:
        """By how much the dump's engine preferred its own choice."""
        if case.sampled is not None:
            return self._race_margin(case, case.sampled, found)
        if found.book:
            scores = self._dump[f"{case.name}.fast_logits"][found.frame, found.book - 1]
        else:
            scores = self._dump[f"{case.name}.semantic_logits"][found.frame]
        return float(scores[found.wanted] - scores[found.got])

    def _race_margin(self, case: Case, own: Sampled, found: Mismatch) -> float:
        """The same where choices were drawn. A semantic token may have come from the regular draw,
        or from the rescue's because a token of the window had nearly won the regular one."""
        frame = found.frame
        if found.book:
            scores = self._dump[f"{case.name}.fast_logits"][frame, found.book - 1]
            uniforms = self._dump[f"{case.name}.uniforms.codes"][frame, found.book - 1]
            return float(race_margins(scores, uniforms, *msgspec.structs.astuple(own))[found.got])
        c = self._subject.config
        scores = self._dump[f"{case.name}.semantic_logits"][frame]
        uniforms = self._dump[f"{case.name}.uniforms.semantic"][frame]
        regular = race_margins(scores, uniforms[0], *msgspec.structs.astuple(own))
        rescue = race_margins(scores, uniforms[1], own.top_k, c.ras_top_p, c.ras_temperature)
        recent = [token for token in self._window(case, frame) if 0 <= token < self._eos]
        direct = 1.0 if found.got in recent else float(regular[found.got])
        rescued = max(float(regular[recent].min(initial=1.0)), float(rescue[found.got]))
        return min(direct, rescued)

    def _differs(self, rung: str, case: Case, found: Mismatch, margin: float, ties: int) -> Outcome:
        return Outcome(
            rung=rung,
            state="failed",
            worst=margin,
            limit=self._limits.tie,
            compared=found.frame,
            ties=ties,
            message=(
                f"{case.name}: first differing frame {found.frame}:"
                f" {found.row_got or 'the end'}, the dump has {found.row_wanted or 'the end'};"
                f" book {found.book} is {found.got} instead of {found.wanted}, although the dump's"
                f" scores prefer its own by {margin:.2e}"
            ),
        )

    def _equal(self, rung: str, steps: int, ties: int) -> Outcome:
        share = 1 - ties / max(1, steps)
        return Outcome(rung=rung, state="passed", compared=steps, ties=ties, agreement=share)
