"""Which Linears are quantised, and how. The only place that decides it.

Only the Linears inside the transformer blocks are packed: wqkv, wo, w1, w2 and w3 of the slow and
of the fast AR. The tied text embedding is the output head too, and the codebook and fast tables
are read a row at a time, so packing them costs quality and saves nothing per frame; `fast_output`
decides every code. They keep their 16 bits, and so does the codec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from warble_mlx.errors import WarbleError

DEFAULT_POLICY = "transformer-linears"
_BLOCK_LINEAR = r"layers\.\d+\.(attention\.(wqkv|wo)|feed_forward\.(w1|w2|w3))"


def _matching(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda path: compiled.fullmatch(path) is not None


POLICIES: Mapping[str, Callable[[str], bool]] = {
    DEFAULT_POLICY: _matching(rf"(fast_)?{_BLOCK_LINEAR}"),
    "slow-linears": _matching(_BLOCK_LINEAR),
    "fast-linears": _matching(rf"fast_{_BLOCK_LINEAR}"),
}

# bits and group sizes that MLX packs in each mode; the first of each is the default
_MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 8, 6, 5, 3, 2), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}
MODES = tuple(_MODES)


class Packing(NamedTuple):
    """How the weights of a Linear are packed. group_size counts inputs that share a scale."""

    bits: int
    group_size: int
    mode: str


class LayerException(NamedTuple):
    """Other bits for every Linear whose path starts with `prefix` (`fast_layers`, `layers.0`)."""

    prefix: str
    bits: int

    def covers(self, path: str) -> bool:
        """Whether `path` lies under the prefix; `layers.1` does not cover `layers.10`."""
        return path == self.prefix or path.startswith(f"{self.prefix}.")


def packing(
    bits: int | None = None, group_size: int | None = None, mode: str = "affine"
) -> Packing:
    """A checked packing; what is not given takes the mode's default.

    Raises WarbleError that lists what the mode allows.
    """
    if mode not in _MODES:
        raise WarbleError(f"quantisation mode {mode!r} is not one of {', '.join(MODES)}")
    known_bits, known_groups = _MODES[mode]
    chosen = Packing(
        known_bits[0] if bits is None else bits,
        known_groups[0] if group_size is None else group_size,
        mode,
    )
    for what, value, known in (
        ("bits", chosen.bits, known_bits),
        ("group size", chosen.group_size, known_groups),
    ):
        if value not in known:
            allowed = ", ".join(map(str, sorted(known)))
            raise WarbleError(f"{what} {value} is not possible in mode {mode}; choose {allowed}")
    return chosen


def plan(
    shapes: Mapping[str, tuple[int, ...]],
    default: Packing,
    policy: str = DEFAULT_POLICY,
    exceptions: Iterable[LayerException] = (),
) -> dict[str, Packing]:
    """Packing of each Linear to be quantised, by module path.

    `shapes` are the weights' shapes [out, in] by module path. The last exception that covers a
    path wins. Raises WarbleError for an unknown policy, for exceptions that cover nothing, and
    for input widths that the group size does not divide (all of them are listed).
    """
    if policy not in POLICIES:
        raise WarbleError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    chosen = {path: default for path in shapes if POLICIES[policy](path)}
    for exception in exceptions:
        covered = [path for path in chosen if exception.covers(path)]
        if not covered:
            raise WarbleError(f"no quantised Linear lies under {exception.prefix!r}")
        own = packing(exception.bits, default.group_size, default.mode)
        chosen |= dict.fromkeys(covered, own)
    uneven = [
        f"{path} ({shapes[path][-1]})"
        for path, p in chosen.items()
        if shapes[path][-1] % p.group_size
    ]
    if uneven:
        raise WarbleError(
            f"group size {default.group_size} does not divide the input width of {len(uneven)}"
            f" Linears: {', '.join(uneven[:5])}"
        )
    torn = [
        path
        for path, p in chosen.items()
        if path.endswith(".w1") and chosen.get(f"{path.removesuffix('1')}3", p) != p
    ]
    if torn:
        raise WarbleError(
            f"w1 and w3 are one product and need the same bits, but those of"
            f" {torn[0].removesuffix('.w1')} differ: make the exception for the whole feed_forward"
        )
    if not chosen:
        raise WarbleError(f"the model has no Linear that policy {policy!r} quantises")
    return chosen
