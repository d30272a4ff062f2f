"""`warble export-ios` and `warble verify-ios`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warble_mlx.cli_base import Number, debug_option, emit, offline_option, option, say_so, table

if TYPE_CHECKING:
    from warble_mlx.ios_export.manifest import Check, Manifest

FAILED_STATUS = 1
PARTS = ("mlxfn", "mlx-swift", "coreml")


class Names(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """Names separated by commas."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(name.strip() for name in str(value).split(",") if name.strip())


@click.command("export-ios")
@click.argument("bundle")
@click.argument("out", type=click.Path(path_type=Path))
@option(
    "--only",
    type=Names(),
    default=",".join(PARTS),
    show_default=True,
    metavar="PARTS",
    help="Which ways into an app. Parts that OUT has already are kept.",
)
@option(
    "--voices",
    "voice_names",
    envvar="WARBLE_EXPORT_VOICES",  # WARBLE_VOICES is the folder of registered voices
    type=Names(),
    default="",
    metavar="NAMES",
    help="Voices of the model or registered ones. Default: all of the model's. In the environment:"
    " WARBLE_EXPORT_VOICES.",
)
@option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Activations of the exported MLX functions.",
)
@option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    show_default=True,
    help="Where the exported MLX functions run; cpu is for machines without a GPU.",
)
@option(
    "--check-frames",
    type=Number(2, kind=int),
    default=100,
    show_default=True,
    metavar="N",
    help="Frames that must equal the runtime's.",
)
@option("--force", is_flag=True, help="Replace OUT if it is an export of something else.")
@option("--no-check", is_flag=True, help="Do not judge the speech; for untrained models.")
@offline_option
@debug_option
def export_ios(
    bundle: str,
    out: Path,
    only: tuple[str, ...],
    voice_names: tuple[str, ...],
    dtype: str,
    device: str,
    check_frames: int,
    force: bool,
    no_check: bool,
    offline: bool,
) -> None:
    """Export BUNDLE, a folder or hub id, as a folder OUT for an iPhone app.

    \b
      mlxfn      prefill, frame step and codec as MLX functions
      mlx-swift  weights and config for an MLX-Swift port
      coreml     Core ML packages of transformers and codec; needs pip install "warble-mlx[ios]"

    Every part is compared with the runtime before it is kept; manifest.json says what was checked,
    with which result, and what only a device can tell. An interrupted export goes on where it was.
    """
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.hub import bundle_for, bundled_folder
    from warble_mlx.ios_export.exporter import export
    from warble_mlx.ios_export.job import Options

    folder = bundled_folder() if bundle == "bundled" else bundle_for(bundle, offline=offline)
    manifest = export(
        folder,
        out,
        only=only,
        voices=voice_names,
        options=Options(
            dtype=dtype,
            device="gpu" if device == "gpu" else "cpu",
            check_frames=check_frames,
            trained=not no_check,
        ),
        force=force,
        say=say_so,
    )
    emit(table(_rows(manifest)))


@click.command("verify-ios")
@click.argument("out", type=click.Path(path_type=Path))
@debug_option
@click.pass_context
def verify_ios(ctx: click.Context, out: Path) -> None:
    """Check OUT, a folder that export-ios has written: hashes, limits, and its self-test.

    The exit status is 0 if nothing failed, 1 if something did. What this machine cannot look at
    is named as unverified.
    """
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.ios_export.verify import verify_export

    failed = 0
    for check in verify_export(out):
        failed += check.result == "fail"
        emit(line_of(check) + "\n")
    emit(f"{out}: {'good' if not failed else f'{failed} failed'}\n")
    if failed:
        ctx.exit(FAILED_STATUS)


def line_of(check: Check) -> str:
    """One check as a line: result, name, value and limit."""
    mark = {"pass": "pass", "fail": "FAIL", "unverified": "----"}[check.result]
    line = f"{mark}  {check.name}"
    if check.value is not None and check.limit is not None:
        line += f": {check.value:.6g} {check.unit}".rstrip() + f" (limit {check.limit:.6g})"
    return f"{line}  {check.note}".rstrip()


def _rows(manifest: Manifest) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("part", "MB", "seconds", "peak MB", "checks", "unverified")]
    for part in manifest.parts:
        passed = sum(c.result == "pass" for c in part.checks)
        rows.append(
            (
                part.name,
                f"{part.nbytes / 1e6:,.1f}",
                f"{part.seconds:,.0f}",
                f"{part.peak_rss_bytes / 1e6:,.0f}",
                f"{passed} passed",
                str(sum(c.result == "unverified" for c in part.checks)),
            )
        )
    return rows
