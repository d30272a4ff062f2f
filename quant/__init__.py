"""Bundle to 4-bit bundle: the policy, its application and what it costs."""

from warble_mlx.quant.policy import DEFAULT_POLICY, LayerException, Packing
from warble_mlx.quant.quantizer import Quantised, quantize

__all__ = ["DEFAULT_POLICY", "LayerException", "Packing", "Quantised", "quantize"]
