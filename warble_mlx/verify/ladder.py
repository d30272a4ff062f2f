"""The rungs of the transformers that compare numbers, from RoPE tables to the fast AR's scores.

Each is fed with the dump's own values, so that one broken part fails its own rung and not all that
follow: a layer reads what the dump's layer before it gave, the heads read the dump's hidden states.
Only `final hidden` is the whole path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from warble_mlx.layers import rotation_for
from warble_mlx.prompt import Reference
from warble_mlx.verify.compare import Array, Limits, Outcome, merged, values
from warble_mlx.verify.passes import Passes


class Rung(NamedTuple):
    """A name, and what finds its outcome (several for the layers)."""

    name: str
    climb: Callable[[], list[Outcome]]


class NumberRungs:
    """Numbers of both transformers."""

    def __init__(self, passes: Passes, limits: Limits) -> None:
        self._passes, self._limits = passes, limits
        self._model, self._dump, self._config = passes.model, passes.dump, passes.subject.config
        self._cases = [case for case in self._dump.info.cases if case.sampled is None]

    def rungs(self) -> Iterator[Rung]:
        """In the order in which they are climbed."""
        yield Rung("prompt", self.prompt)
        yield Rung("rope", self.rope)
        yield Rung("embedding", self.embedding)
        yield Rung("layers", self.layers)
        yield Rung("final hidden", self.hidden)
        yield Rung("semantic logits", self.semantic_logits)
        yield Rung("fast logits", self.fast_logits)

    def prompt(self) -> list[Outcome]:
        """Columns built from the text by this bundle's tokenizer."""
        builder = self._passes.subject.prompts
        known = [case for case in self._dump.info.cases if case.text is not None]
        if builder is None or not known:
            why = "no tokenizer.json" if builder is None else "the dump names no texts"
            return [Outcome(rung="prompt", state="skipped", message=why)]
        parts = []
        for case in known:
            wanted = self._dump[f"{case.name}.columns"]
            reference = None
            if case.reference_text is not None:
                voiced = wanted[0] >= self._config.semantic_begin_id
                reference = Reference(case.reference_text, wanted[1:, voiced])
            assert case.text is not None
            got = builder.build(case.text, reference=reference, exact=True).columns
            parts.append(values("prompt", got, wanted, 0, relative=False, axes="row, column"))
        return [merged("prompt", parts)]

    def rope(self) -> list[Outcome]:
        """The tables in use, bit for bit."""
        wanted = rotation_for(mx.array(self._dump["rope.fast"]), self._config.fast)
        pairs = [
            ("slow: position, pair, (cos, sin)", self._model._slow_rope, self._dump["rope.slow"]),
            (
                "fast, of even elements: position, head, pair",
                self._model._fast_rotation[0],
                wanted[0],
            ),
            (
                "fast, of odd elements: position, head, pair",
                self._model._fast_rotation[1],
                wanted[1],
            ),
        ]
        parts = [
            values("rope", np.array(own), np.array(other), 0, relative=False, axes=axes)
            for axes, own, other in pairs
        ]
        return [merged("rope", parts)]

    def embedding(self) -> list[Outcome]:
        """Prompt columns to vectors."""
        parts = [
            self._values(
                "embedding",
                self._model.embed(mx.array(self._dump[f"{case.name}.columns"])[None])[0],
                self._dump[f"{case.name}.embedding"],
                self._limits.embedding,
                "position, channel",
            )
            for case in self._cases
        ]
        return [merged("embedding", parts)]

    def layers(self) -> list[Outcome]:
        """Every slow layer on the dump's output of the layer before it."""
        found = []
        for i in range(self._config.n_layer):
            before = f"layer.{i - 1}" if i else "embedding"
            parts = [
                self._values(
                    f"layer {i}",
                    self._passes.advance(self._input(f"{case.name}.{before}")[None], [i])[0],
                    self._dump[f"{case.name}.layer.{i}"],
                    self._limits.layer,
                    "position, channel",
                )
                for case in self._cases
            ]
            found.append(merged(f"layer {i}", parts))
        return found

    def hidden(self) -> list[Outcome]:
        """All layers and the final norm, over the prompt and the dump's frames."""
        parts = [
            self._values(
                "final hidden",
                self._passes.own_hidden(case)[1],
                self._dump[f"{case.name}.normed"],
                self._limits.hidden,
                "step, channel",
            )
            for case in self._cases
        ]
        return [merged("final hidden", parts)]

    def semantic_logits(self) -> list[Outcome]:
        """The output head on the dump's hidden states."""
        parts = [
            self._values(
                "semantic logits",
                self._model.semantic_logits(self._input(f"{case.name}.normed")),
                self._dump[f"{case.name}.semantic_logits"],
                self._limits.logits,
                "step, semantic index",
            )
            for case in self._cases
        ]
        return [merged("semantic logits", parts)]

    def fast_logits(self) -> list[Outcome]:
        """The fast AR on the dump's hidden states and codes."""
        parts = []
        for case in self._cases:
            codes = self._passes.codes(case)
            frames = codes.shape[1]
            if frames:
                entry = self._passes.array(self._dump.fast_input(case.name)[:frames])
                parts.append(
                    self._values(
                        "fast logits",
                        self._passes.fast_scores(entry, codes),
                        self._dump[f"{case.name}.fast_logits"],
                        self._limits.logits,
                        "frame, book - 1, code",
                    )
                )
        return [merged("fast logits", parts)]

    def _input(self, name: str) -> mx.array:
        return self._passes.array(self._dump[name])

    def _values(self, rung: str, got: mx.array, wanted: Array, limit: float, axes: str) -> Outcome:
        own = np.array(got.astype(mx.float32))
        return values(rung, own, wanted, limit, relative=self._limits.relative, axes=axes)
