"""The command `warble`.

stdout carries data only; everything said to the person goes to stderr. Exit status: 0 good, 2 bad
input or a model that cannot be used, 3 speech cut by its budget, 4 no speech, 5 a batch in which
rows failed, 1 anything unexpected, 130 Ctrl-C.

Nothing heavy is imported before a command needs it, so that `--help` is instant.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from warble_mlx import __version__
from warble_mlx.cli_base import (
    TextFirst,
    debug_option,
    emit,
    json_option,
    offline_option,
    option,
    say_so,
    table,
)
from warble_mlx.cli_batch import batch
from warble_mlx.cli_bench import bench
from warble_mlx.cli_export import export_ios, verify_ios
from warble_mlx.cli_fidelity import fidelity
from warble_mlx.cli_quantize import (
    Wish,
    check_possible,
    check_upload,
    packing_options,
    quantize,
    send,
    tell_check,
    tell_next,
    upload_options,
)
from warble_mlx.cli_quantize import run as quantize_as_wished
from warble_mlx.cli_say import say
from warble_mlx.cli_serve import serve, wyoming
from warble_mlx.cli_verify import verify
from warble_mlx.cli_voice import voice, voices
from warble_mlx.errors import CheckpointError, SickError, WarbleError

if TYPE_CHECKING:
    from warble_mlx.speech import Speech

INTERRUPTED_STATUS = 130
UNEXPECTED_STATUS = 1
# What a folder or a disk may answer to any write, and no defect of ours.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@click.group(
    cls=TextFirst,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # --top_p and --top-p are the same.
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 100,
    },
    epilog="Every option can be set in the environment: WARBLE_VOICE for --voice,"
    " WARBLE_TOP_P for --top-p, and so on.",
)
@click.version_option(__version__, prog_name="warble")
def warble() -> None:
    """Text to speech with Warble and Audio8 models.

    \b
      warble "Hello there."                     speak
      warble "Hello there." -o hello.wav        write a file
      cat story.txt | warble -o story.mp3       from a pipe
      warble say --help                         all options of speaking

    Text without a command is spoken; options may stand before or after it.
    """


warble.add_command(say)
warble.add_command(batch)
warble.add_command(serve)
warble.add_command(wyoming)
warble.add_command(quantize)
warble.add_command(fidelity)
warble.add_command(bench)
warble.add_command(verify)
warble.add_command(export_ios)
warble.add_command(verify_ios)
warble.add_command(voice)
warble.add_command(voices)


@warble.command()
@click.argument("source")
@click.argument("out")
@option(
    "--codec-dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    default="float16",
    show_default=True,
    help="How the codec is stored.",
)
@packing_options(required=False)
@option("-q", "--quantize", is_flag=True, help="As --bits, at the mode's own bits.")
@upload_options
@option("--revision", metavar="REV", help="Branch, tag or commit of a hub model.")
@option("--force", is_flag=True, help="Replace OUT if it exists.")
@option("--no-check", is_flag=True, help="Do not load the result and let it speak.")
@offline_option
@debug_option
def convert(
    source: str,
    out: str,
    codec_dtype: str,
    quantize: bool,
    upload_repo: str | None,
    dry_run: bool,
    revision: str | None,
    force: bool,
    no_check: bool,
    offline: bool,
    **options: Any,
) -> None:
    """Convert SOURCE, a folder or hub id, into a bundle in the folder OUT.

    Prints what became of the tensors and how large the parts are. The result is loaded and speaks
    a sentence before it appears as OUT.
    """
    from warble_mlx.convert import convert as convert_model
    from warble_mlx.convert import format_report
    from warble_mlx.hub import conversion_bar, locate

    wish = Wish(**options)
    quantised = quantize or wish.bits is not None or wish.mode != "affine"
    if not quantised and wish.given:
        raise click.UsageError(f"{', '.join(wish.given)} need --bits, or -q")
    check_upload(upload_repo, dry_run)
    target = Path(out)
    if quantised:
        check_possible(wish, target, force=force)
    found = locate(source, offline=offline, revision=revision)
    spoken: list[Speech] = []

    def accept(folder: Path) -> None:
        from warble_mlx.speech_check import check_speaks

        spoken.append(check_speaks(folder, "the converted model"))

    with _between(target, quantised) as plain:
        with conversion_bar(shown=True) as advance:
            result = convert_model(
                found.folder,
                plain,
                codec_dtype=codec_dtype,
                force=force,
                source_id=found.repo,
                revision=found.commit,
                progress=advance,
                accept=None if quantised or no_check else accept,
            )
        emit(format_report(result).rstrip("\n") + "\n")
        if quantised:
            quantize_as_wished(plain, target, wish, check=not no_check, force=force)
    for speech in spoken:
        tell_check(speech)
    tell_next(out)
    send(target, upload_repo, dry_run)


@contextmanager
def _between(target: Path, quantised: bool) -> Iterator[Path]:
    """Where the 16-bit bundle goes: `target`, or a temporary folder if it is quantised next."""
    if not quantised:
        yield target
        return
    from warble_mlx.staging import clear_leftovers, temporary_folder

    # Beside the target: the system's own folder for such things may be small, or in memory.
    clear_leftovers(target.resolve())
    with temporary_folder(target.resolve()) as folder:
        yield folder / "bundle"


@warble.command()
@click.argument("bundle")
@offline_option
@debug_option
def inspect(bundle: str, offline: bool) -> None:
    """Show what the model BUNDLE, a folder or hub id, is made of."""
    from warble_mlx.hub import resolve
    from warble_mlx.inspect_bundle import describe_bundle, format_description
    from warble_mlx.model_files import is_bundle

    folder = resolve(bundle, offline=offline)
    if not is_bundle(folder):
        raise CheckpointError(f"{bundle} is no bundle; make one of it: warble convert {bundle} OUT")
    emit(format_description(describe_bundle(folder)) + "\n")


@warble.command()
@json_option
@debug_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this installation, and let the bundled voice speak.

    The exit status is 0 if everything needed works.
    """
    from warble_mlx.doctor import as_rows, examine

    checks = list(examine())
    if as_json:
        emit(json.dumps([check._asdict() for check in checks], ensure_ascii=False) + "\n")
    else:
        emit(table(as_rows(checks)))
    if any(check.state == "problem" for check in checks):
        ctx.exit(UNEXPECTED_STATUS)


def _with_variable(error: click.ClickException) -> click.ClickException:
    """The error, and which variable of the environment its value is from: nobody typed that."""
    if isinstance(error, click.BadParameter) and error.ctx and error.param and error.param.name:
        source = error.ctx.get_parameter_source(error.param.name)
        if source is ParameterSource.ENVIRONMENT:
            told = f"{error.message} (set in the environment as {error.param.envvar})"
            return click.BadParameter(told, error.ctx, error.param)
    return error


def _fill_standard_streams() -> None:
    """Give the null device the numbers 0 to 2 that are closed: a file opened later would get one,
    and MLX takes a file that has number 0 for one that could not be opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _fill_standard_streams()
    args = sys.argv[1:] if args is None else list(args)
    debug = "--debug" in args or os.environ.get("WARBLE_DEBUG", "0") not in ("", "0")
    try:
        status = warble.main(args, prog_name="warble", standalone_mode=False)
    except click.Abort:  # what click makes of Ctrl-C
        say_so("interrupted")
        return INTERRUPTED_STATUS
    except click.ClickException as error:
        _with_variable(error).show()
        return error.exit_code
    except WarbleError as error:
        if debug:
            traceback.print_exc()
        for doubt in error.warnings if isinstance(error, SickError) else ():
            say_so(f"warning: {doubt}")
        say_so(str(error))
        return error.exit_status
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            where = error.filename2 or error.filename
            say_so(f"{f'{where}: ' if where else ''}{error.strerror}")
            return WarbleError.exit_status
        # A defect of ours: say so, and how to see more of it.
        hint = "" if debug else "; --debug shows where"
        say_so(f"unexpected error: {type(error).__name__}: {error}{hint}")
        return UNEXPECTED_STATUS
    return status if isinstance(status, int) else 0
