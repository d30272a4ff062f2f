"""Options of the commands that speak: how codes are drawn, and how the text is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warble_mlx.cli_base import Number, option
from warble_mlx.options import MAX_RETRIES


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--temperature, --top-p, --top-k and --greedy."""
    for decorator in (
        option("--greedy", is_flag=True, help="Always take the most probable, whatever the seed."),
        option("--top-k", metavar="N", type=Number(0, kind=int), help="Candidates to choose from."),
        option("--top-p", metavar="X", type=Number(0, 1), help="Probability mass to choose from."),
        option("--temperature", metavar="X", type=Number(0), help="Variation; 0 is greedy."),
    ):
        command = decorator(command)
    return command


retry_option = option(
    "--retry",
    metavar="N",
    type=Number(0, MAX_RETRIES, kind=int),
    default=0,
    help="Try N times more, with other seeds, when the result is no speech.",
)
normalise_option = option(
    "--normalise",
    is_flag=True,
    help='Read Markdown, links, emoji and numbers as a person would (needs "warble-mlx[text]").',
)
