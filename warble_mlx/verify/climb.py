"""All rungs of a bundle against a dump, or against itself, and the verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import msgspec

from warble_mlx import __version__
from warble_mlx.backend import on_gpu
from warble_mlx.errors import CheckpointError, WarbleError
from warble_mlx.verify.choices import ChoiceRungs
from warble_mlx.verify.codec_ladder import CodecRungs
from warble_mlx.verify.compare import (
    BFLOAT16,
    EXACT,
    EXACT_CODEC,
    QUANTISED,
    ROUNDED_CODEC,
    CodecLimits,
    Limits,
    Outcome,
)
from warble_mlx.verify.dump import Dump, DumpInfo, read_dump
from warble_mlx.verify.ladder import NumberRungs, Rung
from warble_mlx.verify.passes import Passes
from warble_mlx.verify.self_check import SelfRungs
from warble_mlx.verify.subject import Subject, load_subject

SCHEMA = "warble-verify-1"
Progress = Callable[[Outcome], None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `warble verify` found. `against` tells of the dump, None for a self-check."""

    schema: str
    bundle: str
    versions: dict[str, str]
    device: str
    dtype: str
    tf32: bool  # whether MLX may have rounded float32 products
    limits: str  # how strictly the transformers were compared
    codec_limits: str  # exact, or rounded: it is stored at fewer bits than the dump's
    against: DumpInfo | None
    outcomes: list[Outcome]
    passed: bool
    ties: int
    verdict: str


def verify(bundle: Path, dump: Path | None, progress: Progress = lambda _: None) -> Report:
    """Hold a bundle against a dump file, or without one against itself.

    Raises CheckpointError for files that cannot be read or belong to another geometry, WarbleError
    where this process could not compute in float32 if it had to.
    """
    if dump is None:
        subject = load_subject(bundle, "float32")
        outcomes = list(climb_alone(subject, progress))
        return report(bundle.name, subject, None, EXACT, outcomes)
    read = read_dump(dump)
    refuse_tf32(read.info.dtype)
    subject = load_subject(bundle, read.info.dtype)
    limits = limits_for(subject, read.info)
    outcomes = list(climb(subject, read, limits, progress=progress))
    return report(bundle.name, subject, read.info, limits, outcomes)


def tf32_allowed() -> bool:
    """Whether MLX's CUDA backend may round float32 products; it reads the variable at start."""
    cuda = bool(getattr(mx, "cuda", None) and mx.cuda.is_available())
    return cuda and on_gpu() and os.environ.get("MLX_ENABLE_TF32", "1") != "0"


def refuse_tf32(dtype: str) -> None:
    """Raise WarbleError if a float32 comparison would run in TF32."""
    if dtype == "float32" and tf32_allowed():
        raise WarbleError(
            "float32 products are rounded to TF32 here: set MLX_ENABLE_TF32=0 in the environment"
            " before the start and run again"
        )


def limits_for(subject: Subject, info: DumpInfo) -> Limits:
    """How strictly the transformers are compared."""
    if subject.packed != info.packed:
        return QUANTISED
    return EXACT if info.dtype == "float32" else BFLOAT16


def codec_limits_for(subject: Subject, info: DumpInfo) -> CodecLimits:
    """How strictly the codec is compared."""
    return ROUNDED_CODEC if is_rounded(subject, info) else EXACT_CODEC


def is_rounded(subject: Subject, info: DumpInfo | None) -> bool:
    """Whether the codec is stored at fewer bits than it was in the dump's checkpoint."""
    stored = subject.codec_dtype
    return info is not None and stored not in (None, "float32", info.codec_dtype)


def climb(
    subject: Subject,
    dump: Dump,
    limits: Limits,
    codec_limits: CodecLimits | None = None,
    *,
    rows: int = 1,
    progress: Progress = lambda _: None,
) -> Iterator[Outcome]:
    """Every rung's outcome. Behind a failed one the rest of its ladder, transformers or codec, is
    skipped. Raises CheckpointError if the dump was made for other dimensions.
    """
    check_dimensions(subject, dump.info)
    passes = Passes(subject, dump)
    numbers, choices = NumberRungs(passes, limits), ChoiceRungs(passes, limits, rows)
    yield from _climbed([*numbers.rungs(), *choices.rungs()], progress)
    yield from climb_codec(subject, dump, codec_limits, progress)


def climb_codec(
    subject: Subject,
    dump: Dump,
    limits: CodecLimits | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Outcome]:
    """The codec's rungs alone."""
    limits = limits or codec_limits_for(subject, dump.info)
    yield from _climbed(CodecRungs(subject, dump, limits).rungs(), progress)


def climb_alone(subject: Subject, progress: Progress = lambda _: None) -> Iterator[Outcome]:
    """Every rung of the self-check."""
    limits = EXACT if subject.model._dtype == mx.float32 else BFLOAT16
    yield from _climbed(SelfRungs(subject, limits).rungs(), progress)


def _climbed(rungs: Iterable[Rung], progress: Progress) -> Iterator[Outcome]:
    failed: str | None = None
    for rung in rungs:
        if failed is not None:
            outcomes = [Outcome(rung=rung.name, state="skipped", message=f"behind {failed}")]
        else:
            outcomes = rung.climb()
            failed = next((o.rung for o in outcomes if o.state == "failed"), None)
        for outcome in outcomes:
            progress(outcome)
            yield outcome


def check_dimensions(subject: Subject, info: DumpInfo) -> None:
    """Raise CheckpointError naming the dimensions in which a dump's checkpoint differs."""
    ours, theirs = msgspec.to_builtins(subject.config), msgspec.to_builtins(info.config)
    ignored = {"codec_filename"}
    if subject.decoder is None or info.codec_dtype is None:
        ignored |= {name for name in ours if name.startswith("codec_")}
    wrong = [
        f"{name} {ours[name]} (dump: {theirs[name]})"
        for name in ours
        if name not in ignored and ours[name] != theirs[name]
    ]
    if wrong:
        raise CheckpointError(f"the dump was made for another model: {', '.join(wrong)}")


def report(
    bundle: str, subject: Subject, info: DumpInfo | None, limits: Limits, outcomes: list[Outcome]
) -> Report:
    """The report with its verdict."""
    failed = [o for o in outcomes if o.state == "failed"]
    ties = sum(o.ties for o in outcomes)
    dtype = str(subject.model._dtype).removeprefix("mlx.core.")
    return Report(
        schema=SCHEMA,
        bundle=bundle,
        versions={"warble-mlx": __version__, "mlx": mlx_version()},
        device="GPU" if on_gpu() else "CPU",
        dtype=dtype,
        tf32=tf32_allowed(),
        limits=limits.strength,
        codec_limits="rounded" if is_rounded(subject, info) else "exact",
        against=info,
        outcomes=outcomes,
        passed=not failed,
        ties=ties,
        verdict=verdict(failed, ties, subject, info, limits),
    )


def verdict(
    failed: list[Outcome], ties: int, subject: Subject, info: DumpInfo | None, limits: Limits
) -> str:
    """The last line."""
    if failed:
        first = failed[0]
        more = [o.rung for o in failed[1:]]
        also = f"; also failed: {', '.join(more)}" if more else ""
        return f"FAILED at {first.rung}: {first.message}{also}"
    if info is None:
        return (
            "consistent with itself; only a dump of the source (--against) shows that it is equal"
        )
    what = {
        "float32": "the same model in float32",
        "bfloat16": "the same model within bfloat16's precision",
        "quantised": "the same model within what quantisation explains",
    }[limits.strength]
    rounded = is_rounded(subject, info)
    codec = f", its codec within the rounding to {subject.codec_dtype}" if rounded else ""
    counted = f", {ties} tie{'' if ties == 1 else 's'} counted" if ties else ""
    return f"PASSED: {what}{codec}{counted} (against {info.engine})"


def format_outcome(outcome: Outcome) -> str:
    """One line."""
    facts = [outcome.state.ljust(7), outcome.rung.ljust(18)]
    if outcome.worst is not None and outcome.limit is not None:
        facts.append(f"{outcome.worst:.1e} of {outcome.limit:.0e}")
    if outcome.agreement is not None:
        facts.append(f"{outcome.agreement:.2%} equal")
    if outcome.ties:
        facts.append(f"{outcome.ties} tie{'' if outcome.ties == 1 else 's'}")
    if outcome.message:
        facts.append(outcome.message)
    return "  ".join(facts)


def report_json(found: Report) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def mlx_version() -> str:
    """Of the installed wheel, or what the library says of itself."""
    try:
        return metadata.version("mlx")
    except metadata.PackageNotFoundError:  # unpacked beside the interpreter, not installed
        return str(getattr(mx, "__version__", "unknown"))
