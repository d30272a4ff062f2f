"""`warble quantize`, and the quantising options that `warble convert` shares with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warble_mlx.cli_base import debug_option, emit, offline_option, option, table

if TYPE_CHECKING:
    from warble_mlx.quant import LayerException, Quantised


class Exception_(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """`PATH=BITS`."""

    name = "path=bits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        path, equals, bits = str(value).partition("=")
        if not (path and equals and bits.isdigit()):
            self.fail(f"{value!r} is not PATH=BITS, such as fast_layers=8", param, ctx)
        return path, int(bits)


def packing_options(required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--bits, --group-size, --mode, --policy, --except; mlx_lm.convert's names work too."""
    default = "4 if the mode leaves a choice" if required else "16, not quantised"

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in (
            option(
                "--except",
                "exceptions",
                type=Exception_(),
                multiple=True,
                metavar="PATH=BITS",
                help="Other bits below a module path, e.g. fast_layers=8. May repeat.",
            ),
            option("--policy", metavar="NAME", help="Which Linears; default transformer-linears."),
            option("--mode", "--q-mode", default="affine", show_default=True, metavar="MODE"),
            option("--group-size", "--q-group-size", type=int, metavar="N"),
            option("--bits", "--q-bits", type=int, metavar="N", help=f"Default: {default}."),
        ):
            command = decorator(command)
        return command

    return decorate


def exceptions_of(pairs: tuple[tuple[str, int], ...]) -> list[LayerException]:
    """The command line's PATH=BITS pairs as the quantiser takes them."""
    from warble_mlx.quant import LayerException

    return [LayerException(*pair) for pair in pairs]


@click.command()
@click.argument("bundle")
@click.argument("out")
@packing_options(required=True)
@option("--force", is_flag=True, help="Replace OUT if it exists.")
@option("--no-check", is_flag=True, help="Do not load the result and let it speak.")
@offline_option
@debug_option
def quantize(
    bundle: str,
    out: str,
    bits: int | None,
    group_size: int | None,
    mode: str,
    policy: str | None,
    exceptions: tuple[tuple[str, int], ...],
    force: bool,
    no_check: bool,
    offline: bool,
) -> None:
    """Quantise the transformers of BUNDLE, a folder or hub id, into the folder OUT.

    Only the Linears inside the transformer blocks are packed; embeddings, heads, norms and the
    codec keep their precision. Then the result is loaded and speaks a sentence; the exit status
    is 0 only if it did.
    """
    from warble_mlx.backend import prepare

    prepare()
    from warble_mlx.hub import bundle_for
    from warble_mlx.quant import DEFAULT_POLICY
    from warble_mlx.quant import quantize as quantize_bundle

    result = quantize_bundle(
        bundle_for(bundle, offline=offline),
        Path(out),
        bits=bits,
        group_size=group_size,
        mode=mode,
        policy=policy or DEFAULT_POLICY,
        exceptions=exceptions_of(exceptions),
        force=force,
    )
    show(result)
    if not no_check:
        from warble_mlx.cli import check_speaks

        check_speaks(out)


def show(result: Quantised) -> None:
    """Print how many Linears were packed and how, and the size of each file."""
    kinds: dict[str, int] = {}
    for p in result.layers.values():
        kind = f"{p.bits} bits, groups of {p.group_size}, {p.mode}"
        kinds[kind] = kinds.get(kind, 0) + 1
    rows = [(f"{count} Linears", kind) for kind, count in kinds.items()]
    rows += [(name, f"{size / 1e6:,.1f} MB") for name, size in result.nbytes.items()]
    rows.append(("needed to speak", f"{result.total_bytes / 1e6:,.1f} MB"))
    emit(table(rows))
