"""`warble quantize`, and the options of quantising and uploading that `warble convert` shares."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from warble_mlx.cli_base import debug_option, emit, offline_option, option, say_so, table
from warble_mlx.errors import CheckpointError

if TYPE_CHECKING:
    from warble_mlx.quant import LayerException, Quantised
    from warble_mlx.speech import Speech

BUILT_IN = "builtin"


class Exception_(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """`PATH=BITS`."""

    name = "path=bits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        path, equals, bits = str(value).partition("=")
        if not (path and equals and bits.isdigit()):
            self.fail(f"{value!r} is not PATH=BITS, such as fast_layers=8", param, ctx)
        return path, int(bits)


class Wish(NamedTuple):
    """What the quantising options say."""

    bits: int | None
    group_size: int | None
    mode: str
    policy: str | None
    exceptions: tuple[tuple[str, int], ...]
    calibrate: str | None
    report: bool
    text: str | None

    @property
    def given(self) -> list[str]:
        """The options beside --bits and --mode that make no sense without quantising."""
        named = {
            "--group-size": self.group_size is not None,
            "--policy": self.policy is not None,
            "--except": bool(self.exceptions),
            "--calibrate": self.calibrate is not None,
            "--report": self.report,
            "--text": self.text is not None,
        }
        return [name for name, is_given in named.items() if is_given]


def packing_options(required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Everything of a `Wish`; mlx_lm.convert's names work too."""
    default = "4 if the mode leaves a choice" if required else "16, not quantised"

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in (
            text_option,
            option("--report", is_flag=True, help="Measure what it costs, print and keep it."),
            calibrate_option,
            option(
                "--except",
                "exceptions",
                type=Exception_(),
                multiple=True,
                metavar="PATH=BITS",
                help="Other bits below a module path, e.g. fast_layers=8. May repeat.",
            ),
            option(
                "--policy",
                metavar="NAME",
                help="Which Linears: transformer-linears (default), slow-linears, fast-linears.",
            ),
            option(
                "--mode",
                "--q-mode",
                default="affine",
                show_default=True,
                metavar="MODE",
                help="affine, mxfp4, nvfp4 or mxfp8.",
            ),
            option(
                "--group-size",
                "--q-group-size",
                type=int,
                metavar="N",
                help="Inputs that share a scale. Default: 64 affine, 32 mxfp4 and mxfp8, 16 nvfp4.",
            ),
            option("--bits", "--q-bits", type=int, metavar="N", help=f"Default: {default}."),
        ):
            command = decorator(command)
        return command

    return decorate


calibrate_option = option(
    "--calibrate",
    metavar="FILE",
    help="Learn the rounding from what the model makes of this text, a sentence per line, or of"
    f' "{BUILT_IN}" English sentences.',
)
text_option = option(
    "--text",
    metavar="FILE",
    help="Sentences to measure on, one per line; not those of --calibrate. Default: 24 English"
    " ones.",
)


def upload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--upload-repo and --dry-run."""
    for decorator in (
        option("--dry-run", is_flag=True, help="With --upload-repo: show what would be sent."),
        option("--upload-repo", metavar="OWNER/NAME", help="Send the result to the hub."),
    ):
        command = decorator(command)
    return command


def calibration_texts(wanted: str | None) -> Sequence[str]:
    """The sentences that --calibrate names; none without it."""
    if wanted is None:
        return ()
    from warble_mlx.fidelity.streams import read_texts
    from warble_mlx.fidelity.texts import CALIBRATION

    return CALIBRATION if wanted == BUILT_IN else read_texts(Path(wanted))


def evaluation_texts(wanted: str | None) -> Sequence[str]:
    """The sentences that --text names, or the package's."""
    from warble_mlx.fidelity.streams import read_texts
    from warble_mlx.fidelity.texts import EVALUATION

    return EVALUATION if wanted is None else read_texts(Path(wanted))


def exceptions_of(pairs: tuple[tuple[str, int], ...]) -> list[LayerException]:
    """The command line's PATH=BITS pairs as the quantiser takes them."""
    from warble_mlx.quant import LayerException

    return [LayerException(*pair) for pair in pairs]


@click.command()
@click.argument("bundle")
@click.argument("out")
@packing_options(required=True)
@upload_options
@option("--force", is_flag=True, help="Replace OUT if it exists.")
@option("--no-check", is_flag=True, help="Do not load the result and let it speak.")
@offline_option
@debug_option
def quantize(
    bundle: str,
    out: str,
    upload_repo: str | None,
    dry_run: bool,
    force: bool,
    no_check: bool,
    offline: bool,
    **wish: Any,
) -> None:
    """Quantise the transformers of BUNDLE, a folder or hub id, into the folder OUT.

    \b
      warble quantize ./bundle ./bundle-4bit --calibrate builtin --report
      warble quantize ./bundle ./mixed --bits 4 --except fast_layers=8

    Only the Linears inside the transformer blocks are packed; embeddings, heads, norms and the
    codec keep their precision. The result is held against its source and speaks a sentence
    before it appears as OUT.
    """
    check_upload(upload_repo, dry_run)
    wanted = Wish(**wish)
    check_possible(wanted, Path(out), force=force)
    from warble_mlx.hub import bundle_for

    source = bundle_for(bundle, offline=offline)
    run(source, Path(out), wanted, check=not no_check, force=force)
    tell_next(out)
    send(Path(out), upload_repo, dry_run)


def check_possible(wish: Wish, out: Path, *, force: bool) -> None:
    """Say what is wrong before minutes are spent on a download or a conversion."""
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.quant.policy import packing
    from warble_mlx.quant.quantizer import mlx_lm_packing

    packing(wish.bits, wish.group_size, wish.mode)
    if out.exists() and not force:
        raise CheckpointError(f"{out} exists already. Give another folder, or --force")
    mlx_lm_packing()


def run(source: Path, out: Path, wish: Wish, *, check: bool, force: bool) -> None:
    """Quantise as wished, and show what came of it."""
    from warble_mlx.quant import DEFAULT_POLICY
    from warble_mlx.quant import quantize as quantize_bundle

    result = quantize_bundle(
        source,
        out,
        bits=wish.bits,
        group_size=wish.group_size,
        mode=wish.mode,
        policy=wish.policy or DEFAULT_POLICY,
        exceptions=exceptions_of(wish.exceptions),
        calibration=calibration_texts(wish.calibrate),
        report=evaluation_texts(wish.text) if wish.report else (),
        check=check,
        force=force,
        progress=say_so,
    )
    show(result)
    if result.speech is not None:
        tell_check(result.speech)


def tell_check(speech: Speech) -> None:
    """The line on the sentence that a new model has spoken."""
    from warble_mlx.cli_say import figures

    click.echo(f"check: {figures(speech)}", err=True)


def tell_next(out: str) -> None:
    """The command that speaks with a new model."""
    click.echo(f'next: warble say -m {shlex.quote(out)} "Hello there."', err=True)


def show(result: Quantised) -> None:
    """Print how many Linears were packed and how, the size of each component, and the report."""
    from warble_mlx.inspect_bundle import size_table
    from warble_mlx.quant.proof import PUBLISHED_LIMIT

    kinds: dict[tuple[str, str], int] = {}
    for path, p in result.layers.items():
        of = "fast AR" if path.startswith("fast_") else "slow AR"
        kind = (of, f"{p.bits} bits, groups of {p.group_size}, {p.mode}")
        kinds[kind] = kinds.get(kind, 0) + 1
    rows = [(f"{count} Linears", *kind) for kind, count in kinds.items()]
    emit(table(rows))
    emit("\n".join(size_table(result.parts)) + "\n")
    emit(
        f"needed to speak, tokenizer included: {result.total_bytes / 1e6:,.1f} MB (the published"
        f" model's limit at 4 bits: {PUBLISHED_LIMIT / 1e6:,.0f} MB)\n"
    )
    if result.fidelity is not None:
        from warble_mlx.fidelity.report import format_fidelity

        emit("\n" + format_fidelity(result.fidelity))


def check_upload(repo: str | None, dry_run: bool) -> None:
    """Say what is wrong with the upload's options before any work is done."""
    if repo is None:
        if dry_run:
            raise click.UsageError("--dry-run needs --upload-repo")
        return
    from warble_mlx.publish import check_repo

    check_repo(repo)


def send(folder: Path, repo: str | None, dry_run: bool) -> None:
    """Upload a finished bundle if asked to, or list what would go."""
    if repo is None:
        return
    from warble_mlx.publish import plan_upload, upload

    plan = plan_upload(folder, repo)
    if dry_run:
        rows = [(name, f"{size / 1e6:,.1f} MB") for name, size in plan.files.items()]
        emit(table([*rows, (f"would go to {repo}", f"{plan.total_bytes / 1e6:,.1f} MB")]))
        return
    say_so(f"sending {plan.total_bytes / 1e6:,.1f} MB to {repo}")
    say_so(f"uploaded: {upload(plan)}")
