"""`warble fidelity`."""

from __future__ import annotations

from pathlib import Path

import click

from warble_mlx.cli_base import (
    Number,
    debug_option,
    emit,
    offline_option,
    option,
    report_option,
    say_so,
)
from warble_mlx.cli_quantize import (
    calibrate_option,
    calibration_texts,
    evaluation_texts,
    text_option,
)
from warble_mlx.report_file import check_chart, check_report, write_report_file

MAX_SEED = 2**31 - 1  # one is added per text


@click.command()
@click.argument("reference")
@click.argument("bundle", required=False)
@option("--sweep", is_flag=True, help="Try many packings of REFERENCE in memory.")
@option("--codec", is_flag=True, help="Try ways of storing REFERENCE's codec.")
@text_option
@calibrate_option
@option("--seed", type=Number(0, MAX_SEED, kind=int), metavar="N", help="Of the first text.")
@report_option
@option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw it (png, svg, pdf); the sweep if there is one.",
)
@offline_option
@debug_option
def fidelity(
    reference: str,
    bundle: str | None,
    sweep: bool,
    codec: bool,
    text: str | None,
    calibrate: str | None,
    seed: int | None,
    json_out: str | None,
    chart: Path | None,
    offline: bool,
) -> None:
    """Measure how far BUNDLE is from REFERENCE, the bundle that it was quantised from.

    \b
      warble fidelity ./bundle ./bundle-4bit --chart books.png
      warble fidelity ./bundle --sweep --calibrate builtin --chart sweep.png
      warble fidelity ./bundle-float32 --codec

    REFERENCE speaks a list of texts; both then read those tokens, and their distributions are
    compared codebook by codebook. Both also speak the texts on their own, and both codecs play
    the same tokens.
    """
    if bundle is None and not (sweep or codec):
        raise click.UsageError("give BUNDLE, or --sweep, or --codec")
    if calibrate is not None and not sweep:
        raise click.UsageError("--calibrate belongs to --sweep; `warble quantize` has its own")
    if chart is not None and bundle is None and not sweep:
        raise click.UsageError("--chart needs BUNDLE or --sweep")
    if json_out and json_out != "-":
        check_report(Path(json_out))
    if chart is not None:
        check_chart(chart)
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.fidelity import compare as comparing
    from warble_mlx.fidelity import report as reporting
    from warble_mlx.fidelity import sweep as sweeping
    from warble_mlx.hub import bundle_for

    source = bundle_for(reference, offline=offline)
    texts = evaluation_texts(text)
    seed = comparing.SEED if seed is None else seed
    documents: dict[str, reporting.Document] = {}
    lines: list[str] = []
    drawn: comparing.Fidelity | sweeping.Sweep | None = None
    if bundle is not None:
        other = bundle_for(bundle, offline=offline)
        drawn = comparing.compare(source, other, texts, seed=seed, progress=say_so)
        documents["comparison"] = drawn
        lines.append(reporting.format_fidelity(drawn))
    if sweep:
        drawn = sweeping.sweep(
            source,
            texts,
            calibration=calibration_texts(calibrate),
            seed=seed,
            progress=say_so,
        )
        documents["sweep"] = drawn
        lines.append(reporting.format_sweep(drawn))
    if codec:
        from warble_mlx.fidelity.waveform import storage_choices

        choices = storage_choices(source, comparing.spoken_streams(source, texts, seed))
        documents["codec"] = choices
        lines.append(reporting.format_codec(choices))
    written = reporting.to_json(documents)
    if json_out and json_out != "-":
        write_report_file(written.encode(), Path(json_out))
    if chart is not None and drawn is not None:
        from warble_mlx.fidelity.chart import draw

        draw(drawn, chart)
    emit(written if json_out == "-" else "\n".join(lines))
