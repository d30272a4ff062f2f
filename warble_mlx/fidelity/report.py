"""The figures as text for a terminal, as Markdown for a model card, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from warble_mlx.convert.report import table
from warble_mlx.fidelity.compare import Fidelity
from warble_mlx.fidelity.sweep import Row, Sweep
from warble_mlx.fidelity.waveform import StoredCodec, WaveformDifference

FIDELITY_FILE = "fidelity.json"

Document = Fidelity | Sweep | Sequence[StoredCodec]


def to_json(document: Document | Mapping[str, Document]) -> str:
    """One document, or several by name."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def format_fidelity(f: Fidelity) -> str:
    """A report as aligned text."""
    d = f.divergence
    rows = [("codebook", "KL, nats", "same best", "perplexity", "reference")]
    rows += [
        (
            f"{i}, slow AR" if i == 0 else f"{i}, fast AR",
            f"{book.kl:.4f}",
            f"{book.agreement:.1%}",
            f"{book.perplexity:.2f}",
            f"{book.reference_perplexity:.2f}",
        )
        for i, book in enumerate(d.books)
    ]
    rows.append(("mean of 1 to 9", f"{d.fast_kl:.4f}", f"{d.fast_agreement:.1%}", "", ""))
    head = (
        f"{f.bundle} against {f.reference}: {f.texts} texts, {d.frames:,} frames of the reference"
    )
    return "\n".join([head, *table(rows), "", *_facts(f)]) + "\n"


def _facts(f: Fidelity) -> list[str]:
    free = f.free_running
    shift = "no utterance was ended by both"
    if free.mean_shift is not None:
        shift = (
            f"EOS {free.mean_shift:+.1f} frames on average, {free.mean_absolute_shift:.1f} in"
            " absolute value"
        )
    return [
        f"free running: {free.ended} of {free.utterances} ended by themselves (reference"
        f" {free.reference_ended}), {shift}, length ratio {free.length_ratio:.3f}",
        f"codec: {_waveform(f.waveform)}",
        f"read per frame: {f.bytes_per_frame / 1e6:,.1f} MB, reference"
        f" {f.reference_bytes_per_frame / 1e6:,.1f} MB; model file {f.model_bytes / 1e6:,.1f} MB,"
        f" reference {f.reference_model_bytes / 1e6:,.1f} MB",
    ]


def _waveform(w: WaveformDifference) -> str:
    if w.snr_db is None:
        return f"the same samples ({w.seconds:.0f} s)"
    return f"SNR {w.snr_db:.1f} dB, largest difference {w.largest:.2e} ({w.seconds:.0f} s)"


def fidelity_markdown(f: Fidelity) -> str:
    """A report as a section of a model card."""
    d = f.divergence
    lines = [
        "## What the quantisation costs",
        "",
        f"Against the 16-bit source on {d.frames:,} frames that it generated from {f.texts} texts,"
        " teacher-forced, in float32 arithmetic (`warble fidelity`):",
        "",
        "| codebook | KL, nats | same best token | perplexity | of the source |",
        "| :-- | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {i} | {b.kl:.4f} | {b.agreement:.1%} | {b.perplexity:.2f} |"
        f" {b.reference_perplexity:.2f} |"
        for i, b in enumerate(d.books)
    ]
    return "\n".join([*lines, "", *(f"- {fact}" for fact in _facts(f))])


def format_sweep(s: Sweep) -> str:
    """A sweep as aligned text, components of one packing below each other."""
    rows: list[tuple[str, ...]] = [
        ("packing", "of", "MB/frame", "KL slow", "KL fast", "same slow", "same fast")
    ]
    rows += [_sweep_cells(row) for row in s.rows]
    head = (
        f"{s.reference}: {s.texts} texts, {s.rows[0].divergence.frames:,} frames; 16 bits read"
        f" {s.reference_bytes_per_frame / 1e6:,.2f} MB per frame"
    )
    return "\n".join([head, *table(rows)]) + "\n"


def _sweep_cells(row: Row) -> tuple[str, ...]:
    p, d = row.packing, row.divergence
    name = f"{p.mode} {p.bits} g{p.group_size}" + (", learned" if row.learned else "")
    return (
        name,
        row.component,
        f"{row.bytes_per_frame / 1e6:,.2f}",
        f"{d.semantic_kl:.4f}",
        f"{d.fast_kl:.4f}",
        f"{d.semantic_agreement:.1%}",
        f"{d.fast_agreement:.1%}",
    )


def format_codec(choices: Sequence[StoredCodec]) -> str:
    """Ways to store a codec as aligned text."""
    rows = [("codec decoder stored as", "MB", "SNR, dB", "largest difference")]
    rows += [
        (
            c.name,
            f"{c.nbytes / 1e6:,.2f}",
            "same" if c.difference.snr_db is None else f"{c.difference.snr_db:.1f}",
            f"{c.difference.largest:.2e}",
        )
        for c in choices
    ]
    seconds = choices[0].difference.seconds
    return (
        "\n".join([f"against the file as it is, on {seconds:.0f} s of speech", *table(rows)]) + "\n"
    )
