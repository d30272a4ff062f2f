"""The neural codec: ten codes per frame to 44.1 kHz samples, and back."""

from warble_mlx.codec.decoder import CodecDecoder
from warble_mlx.codec.encoder import CodecEncoder

__all__ = ["CodecDecoder", "CodecEncoder"]
