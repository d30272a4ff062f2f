"""`warble verify`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from warble_mlx.cli_base import debug_option, emit, offline_option, option, report_option, say_so
from warble_mlx.report_file import check_report, write_report_file

STDOUT = "-"
FAILED_STATUS = 1


@click.command()
@click.argument("bundle")
@option(
    "--against",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="DUMP",
    help="What another engine computed from the bundle's source.",
)
@report_option
@offline_option
@debug_option
@click.pass_context
def verify(
    ctx: click.Context, bundle: str, against: Path | None, json_out: str | None, offline: bool
) -> None:
    """Show whether BUNDLE, a folder or hub id, is the same model as its source.

    \b
      warble verify ./out                                   does it agree with itself?
      warble verify ./out --against source.safetensors      is it the same model?

    A dump is written by the reference engine or by an adapter for the published code, both in the
    folder tests/reference of the source tree. From RoPE tables to the waveform each part is held
    against it, with its own tolerance; codes must be equal. A code that differs only because two
    scores are closer than 1e-4 is counted as a tie. The exit status is 0 if everything passed, 1 if
    not.
    """
    # Read by MLX's CUDA backend when it starts: float32 has to mean float32 here.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.hub import resolve
    from warble_mlx.verify.climb import format_outcome, report_json
    from warble_mlx.verify.climb import verify as climb

    text = json_out != STDOUT
    if json_out and text:
        check_report(Path(json_out))
    folder = resolve(bundle, offline=offline)
    found = climb(
        folder,
        against,
        progress=lambda outcome: emit(format_outcome(outcome) + "\n") if text else None,
    )
    if text:
        tf32 = "TF32 on" if found.tf32 else "no TF32"
        say_so(f"{found.device}, {found.dtype}, {tf32}, limits for {found.limits}")
        emit(found.verdict + "\n")
    if json_out == STDOUT:
        emit(report_json(found))
    elif json_out:
        write_report_file(report_json(found), Path(json_out))
    if not found.passed:
        ctx.exit(FAILED_STATUS)
