"""What tests of `warble verify` share."""

from __future__ import annotations

from pathlib import Path

import msgspec
from golden_data import FOLDER

from warble_mlx.verify.choices import ChoiceRungs
from warble_mlx.verify.climb import climb, limits_for
from warble_mlx.verify.compare import EXACT, Outcome
from warble_mlx.verify.dump import Dump
from warble_mlx.verify.passes import Passes
from warble_mlx.verify.subject import Subject

DUMP = FOLDER / "dump_small.safetensors"
RUNGS = [
    "prompt", "rope", "embedding", "layer 0", "layer 1", "final hidden", "semantic logits",
    "fast logits", "greedy codes", "sampled codes", "codec rope", "codec dequantised",
    "codec latents", "waveform", "waveform streamed", "codec codes",
]  # fmt: skip


def converted(source: Path, out: Path, codec_dtype: str = "float32") -> Path:
    """A bundle of the checkpoint in `source`."""
    from warble_mlx.convert import convert

    convert(source, out, codec_dtype=codec_dtype)
    return out


def outcomes(subject: Subject, dump: Dump) -> list[Outcome]:
    """Every rung that can be climbed."""
    return list(climb(subject, dump, limits_for(subject, dump.info)))


def failed(found: list[Outcome]) -> list[str]:
    """Rungs that failed."""
    return [o.rung for o in found if o.state == "failed"]


def greedy(subject: Subject, dump: Dump) -> Outcome:
    """The rung of greedy codes, from the first case alone."""
    info = msgspec.structs.replace(dump.info, cases=dump.info.cases[:1])
    rungs = ChoiceRungs(Passes(subject, Dump(info, dump.tensors)), EXACT)
    (found,) = rungs.greedy_codes()
    return found
