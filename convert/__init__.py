"""Source checkpoint to bundle: every published layout in, one layout out."""

from warble_mlx.convert.converter import Progress, convert
from warble_mlx.convert.report import Component, Report, format_report

__all__ = ["Component", "Progress", "Report", "convert", "format_report"]
