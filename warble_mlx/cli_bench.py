"""`warble bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from warble_mlx.cli_base import (
    Number,
    debug_option,
    emit,
    model_option,
    offline_option,
    option,
    report_option,
    say_so,
)
from warble_mlx.report_file import check_chart, check_report

STDOUT = "-"


class Bandwidths(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """One or more numbers of GB/s, commas or spaces between them."""

    name = "GB/s"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        number = Number(0, above=True)
        return tuple(number.convert(n, param, ctx) for n in value.replace(",", " ").split())


class TakesLists(click.Command):
    """A command whose option --project may be followed by several numbers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        rest = list(args)
        while rest:
            joined.append(rest.pop(0))
            if joined[-1] == "--project":
                numbers = []
                while rest and _is_number(rest[0]):
                    numbers.append(rest.pop(0))
                joined += [" ".join(numbers)] if numbers else []
        return super().parse_args(ctx, joined)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").isdigit()


@click.command(cls=TakesLists)
@model_option
@option(
    "--synthetic",
    type=click.Choice(["full", "tiny"]),
    help="Measure a model made in memory instead: the published size, or a tiny one.",
)
@option(
    "--bits",
    type=click.Choice(["4", "8", "16"]),
    help="Bits of the synthetic model's transformer blocks. Default: 16.",
)
@option(
    "--prompt",
    "prompt_columns",
    type=Number(21, 2000, kind=int),
    metavar="N",
    help="Columns of the synthetic model's prompt. Default: 64.",
)
@option("--frames", type=Number(2, 2000, kind=int), default=150, show_default=True, help="Per run.")
@option("--runs", type=Number(1, 1000, kind=int), default=3, show_default=True, help="Timed runs.")
@option(
    "--warmup", type=Number(0, 1000, kind=int), default=1, show_default=True, help="Runs before."
)
@option(
    "--rows",
    type=Number(1, 1024, kind=int),
    default=1,
    show_default=True,
    help="Streams stepped together.",
)
@option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of activations.")
@option(
    "--project",
    type=Bandwidths(),
    default=(),
    help="Also project the lowest RTF of devices with so much bandwidth: 60 120 546.",
)
@report_option
@option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a bar chart (png, svg, pdf).",
)
@option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="A B",
    help="Measure nothing: print the ratios of two JSON files.",
)
@offline_option
@debug_option
@click.pass_context
def bench(
    ctx: click.Context,
    model: str | None,
    synthetic: str | None,
    bits: str | None,
    prompt_columns: int | None,
    frames: int,
    runs: int,
    warmup: int,
    rows: int,
    dtype: str | None,
    project: Sequence[float],
    json_out: str | None,
    chart: Path | None,
    compare: tuple[Path, Path] | None,
    offline: bool,
) -> None:
    """Measure how fast a model speaks here, and what bounds it.

    \b
      warble bench                                      the bundled voice
      warble bench --synthetic full --bits 4            published size, no download
      warble bench --json a.json --project 60 120 546
      warble bench --compare a.json b.json

    Times frames in the same loop that speaks, counts what a frame dispatches, reads and
    multiplies, measures what this device can do, and names the bottleneck.
    """
    if compare:
        compare_files(*compare)
        return
    typed = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if synthetic and "model" in typed:
        raise click.UsageError("--model and --synthetic exclude each other")
    if not synthetic and typed & {"bits", "prompt_columns"}:
        raise click.UsageError(
            "--bits and --prompt describe a --synthetic model; a bundle has its own bits:"
            " warble quantize changes them"
        )
    if json_out and json_out != STDOUT:
        check_report(Path(json_out))
    if chart:
        check_chart(chart)
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.bench import bundle_subject, format_report, measure, synthetic_subject
    from warble_mlx.bench.report import report_json, write_report

    say_so("loading")
    if synthetic:
        subject = synthetic_subject(
            synthetic,  # type: ignore[arg-type]  # click has checked it
            bits=int(bits or 16),
            dtype=dtype,
            **({"prompt_columns": prompt_columns} if prompt_columns else {}),
        )
    else:
        subject = bundle_subject(model, dtype=dtype, offline=offline)
    report = measure(
        subject,
        frames=frames,
        runs=runs,
        warmup=warmup,
        rows=rows,
        bandwidths=project,
        progress=say_so,
    )
    if json_out and json_out != STDOUT:
        write_report(report, Path(json_out))
    if chart:
        from warble_mlx.bench.chart import draw

        draw(report, chart)
    emit(report_json(report) if json_out == STDOUT else format_report(report))


def compare_files(a: Path, b: Path) -> None:
    """Print the ratios of two reports."""
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.bench import compare, read_report

    emit(compare(read_report(a), read_report(b)))
