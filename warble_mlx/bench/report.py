"""Everything one measurement found, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from warble_mlx.bench.cost import Read, distinct_bytes, total_bytes
from warble_mlx.bench.generation import Generation, Speaking
from warble_mlx.bench.graph import FUSED, VIEWS, Primitives
from warble_mlx.bench.hardware import Hardware
from warble_mlx.bench.machine import Machine
from warble_mlx.bench.verdict import Floors, Verdict
from warble_mlx.cli_base import table
from warble_mlx.errors import WarbleError
from warble_mlx.report_file import write_report_file

SCHEMA = "warble-bench/1"
LISTED_PRIMITIVES = 16

# Published memory bandwidths, GB/s, of devices that this can be projected to.
KNOWN_BANDWIDTHS = {
    60: "A18 Pro",
    68: "M1",
    100: "M2, M3",
    120: "M4",
    153: "M5",
    273: "M4 Pro",
    410: "M4 Max, 32 GPU cores",
    546: "M4 Max, 40 GPU cores",
    819: "M3 Ultra",
}


class Model(msgspec.Struct, frozen=True):
    """What was measured. `stored_bits`: of the blocks' Linears in the bundle; `packed`: in memory
    too, or unpacked to `dtype` as on a CPU."""

    name: str
    sha256: str
    dtype: str
    stored_bits: int
    packed: bool
    compiled: bool
    slow: str
    fast: str


class Projection(msgspec.Struct, frozen=True):
    """The lowest RTF that `gbs` GB/s allow: the stored weights' bytes per frame, times the frame
    rate, over the bandwidth. Nothing of it was measured."""

    gbs: float
    device: str
    rtf_floor: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `reads` and `macs` are per step, by component; `stored_bytes` is what the
    bundle's own weights and a 16-bit cache would take, which projections are made from."""

    schema: str
    date: str
    command: str
    machine: Machine
    model: Model
    slots: int
    generation: Generation
    speaking: Speaking
    parts_ms: dict[str, float]
    host_ms: float
    primitives: Primitives
    unfused: Primitives
    reads: dict[str, Read]
    macs: dict[str, int]
    stored_bytes: int
    hardware: Hardware
    floors: Floors
    verdict: Verdict
    projections: list[Projection]


def project(
    stored_bytes: int, frame_rate_hz: float, bandwidths: Iterable[float]
) -> list[Projection]:
    """RTF floors of other devices from bytes per frame."""
    return [
        Projection(
            gbs=gbs,
            device=KNOWN_BANDWIDTHS.get(round(gbs), ""),
            rtf_floor=stored_bytes * frame_rate_hz / (gbs * 1e9),
        )
        for gbs in bandwidths
    ]


def write_report(report: Report, path: Path) -> None:
    """Write JSON; the file appears whole or not at all."""
    write_report_file(report_json(report), path)


def report_json(report: Report) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """Read what `write_report` wrote; raises WarbleError for anything else."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise WarbleError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WarbleError(f"{path} is no report of `warble bench --json`: {error}") from error
    if report.schema != SCHEMA:
        raise WarbleError(f'{path} has the schema "{report.schema}", this version reads "{SCHEMA}"')
    return report


def format_report(report: Report) -> str:
    """The report as aligned text, the verdict last."""
    sections = [
        _facts(report),
        _speed(report),
        _parts(report),
        _primitives(report),
        _reads(report),
        _floors(report),
        _projections(report),
        "\n".join([report.verdict.sentence, *report.verdict.advice]) + "\n",
    ]
    return "\n".join(section for section in sections if section)


def _facts(r: Report) -> str:
    m = r.machine
    wheels = ", ".join(f"{name} {version}" for name, version in m.mlx_wheels.items())
    bits = f"{r.model.stored_bits}-bit" + (
        "" if r.model.packed or r.model.stored_bits == 16 else f", unpacked to {r.model.dtype}"
    )
    return table(
        [
            ("model", f"{r.model.name} ({r.model.sha256[:12]})"),
            ("slow AR", r.model.slow),
            ("fast AR", r.model.fast),
            ("weights", f"blocks {bits}; activations {r.model.dtype}"),
            ("step", "compiled" if r.model.compiled else "not compiled"),
            ("device", m.device),
            ("machine", f"{m.processor}, {m.cores} cores, {m.system}"),
            ("software", f"warble-mlx {m.warble_mlx}, mlx {m.mlx} ({wheels}), Python {m.python}"),
            ("blas", m.blas),
        ]
    )


def _speed(r: Report) -> str:
    g, s = r.generation, r.speaking
    return table(
        [
            ("frames", f"{g.frames} per run, {g.rows} at a time, {g.runs} warm runs"),
            ("step", f"{g.ms_per_step:.2f} ms (p50 {g.step_p50_ms:.2f}, p95 {g.step_p95_ms:.2f})"),
            ("frames/s", f"{g.frames_per_s:.1f}"),
            ("first frame", f"{g.first_frame_ms:.0f} ms"),
            ("RTF, transformers", f"{g.rtf:.3f}"),
            ("RTF, one utterance with codec", f"{s.rtf:.3f}"),
            ("first audio", f"{s.first_audio_ms:.0f} ms"),
            ("peak memory", f"{g.peak_memory_bytes / 1e6:,.0f} MB"),
        ]
    )


def _parts(r: Report) -> str:
    rows = [("part, alone", "ms per frame")]
    rows += [(name, f"{value:.2f}") for name, value in r.parts_ms.items()]
    rows.append(("codec, streamed", f"{r.speaking.codec_ms_per_frame:.2f}"))
    rows.append(("building the graph, on the host meanwhile", f"{r.host_ms:.2f}"))
    return table(rows)


def _primitives(r: Report) -> str:
    now, before = r.primitives, r.unfused
    names = [name for name in now.by_name if name not in VIEWS]
    names += [name for name in before.by_name if name not in VIEWS and name not in names]
    rows = [("primitive", "dispatched", "before fusion")]
    shown = names[:LISTED_PRIMITIVES]
    for name in shown:
        rows.append((name, str(now.by_name.get(name, 0)), str(before.by_name.get(name, 0))))
    others = names[len(shown) :]
    rest, rest_before = (sum(p.by_name.get(name, 0) for name in others) for p in (now, before))
    if others:
        rows.append((f"{len(others)} others", str(rest), str(rest_before)))
    rows.append(("all", str(now.dispatched), str(before.dispatched)))
    rows.append(("views, not dispatched", str(now.views), str(before.views)))
    fused = now.by_name.get(FUSED, 0)
    note = f"{FUSED} is {fused} fused groups.\n" if fused else ""
    return table(rows) + note


def _reads(r: Report) -> str:
    rows = [("per step", "MB", "times", "MB read", "M multiply-adds")]
    named = dict.fromkeys([*r.reads, *r.macs])
    for name in named:
        read, macs = r.reads.get(name), r.macs.get(name)
        rows.append(
            (
                name,
                f"{read.nbytes / 1e6:,.2f}" if read else "",
                str(read.times) if read else "",
                f"{read.total / 1e6:,.2f}" if read else "",
                f"{macs / 1e6:,.1f}" if macs else "",
            )
        )
    once = f"{distinct_bytes(r.reads) / 1e6:,.2f}"
    whole = f"{total_bytes(r.reads) / 1e6:,.2f}"
    rows.append(("all", once, "", whole, f"{sum(r.macs.values()) / 1e6:,.1f}"))
    return table(rows)


def _floors(r: Report) -> str:
    h, f, g = r.hardware, r.floors, r.generation

    def line(name: str, floor: float, why: str) -> tuple[str, str, str, str]:
        return name, f"{floor:.2f}", f"{floor / g.ms_per_step:.0%}", why

    return table(
        [
            ("floor", "ms", "of the step", "measured here"),
            line("launch", f.launch_ms, f"{h.launch_us:.2f} µs per dependent primitive"),
            line(
                "bandwidth",
                f.bandwidth_ms,
                f"copy {h.copy_gbs:,.1f} GB/s, matrix-vector {h.read_gbs:,.1f} GB/s",
            ),
            line("compute", f.compute_ms, f"{h.gmacs:,.0f} G multiply-adds/s, {r.model.dtype}"),
        ]
    )


def _projections(r: Report) -> str:
    if not r.projections:
        return ""
    rows = [("PROJECTION, not measured", "GB/s", "lowest RTF")]
    rows += [(p.device or "device", f"{p.gbs:g}", f"{p.rtf_floor:.3f}") for p in r.projections]
    return table(rows) + (
        f"from {r.stored_bytes / 1e6:,.1f} MB per frame of {r.model.stored_bits}-bit weights and a"
        " 16-bit cache; a real device also pays for dispatches, arithmetic and the codec.\n"
    )
