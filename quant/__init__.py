"""Bundle to 4-bit bundle: the policy, its application and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warble_mlx.quant.policy import DEFAULT_POLICY, LayerException, Packing

if TYPE_CHECKING:
    from warble_mlx.quant.quantizer import Quantised, quantize

__all__ = ["DEFAULT_POLICY", "LayerException", "Packing", "Quantised", "quantize"]


def __getattr__(name: str) -> object:
    # The policy is wanted in many places, by some that the quantiser itself needs.
    if name not in ("Quantised", "quantize"):
        raise AttributeError(f"module 'warble_mlx.quant' has no attribute {name!r}")
    from warble_mlx.quant import quantizer

    return getattr(quantizer, name)
