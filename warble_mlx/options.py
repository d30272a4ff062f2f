"""What may be asked of a speech: one list of names for every way to ask, and the checks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from warble_mlx.errors import BudgetError, WarbleError
from warble_mlx.splitting import LONGEST_BREAK_S

if TYPE_CHECKING:
    from warble_mlx.engine import Sampling
    from warble_mlx.registered import RegisteredVoice

MAX_SEED = 2**32 - 1
MAX_RETRIES = 3
DEFAULT_PAUSE_S = 0.25


class Options(TypedDict, total=False):
    """Keywords of `Warble.say`, `stream`, `astream` and `plan`; all may be left out."""

    # Name, number or `speaker N` of one of the model's voices, the name of a registered voice, a
    # RegisteredVoice, or the Path of a voice file (a string never is one).
    voice: str | int | Path | RegisteredVoice | None
    # A clip to sound like, and what is said in it. Doubts about it are issued as VoiceWarning.
    ref_audio: str | Path | None
    ref_text: str | None
    # 0 … MAX_SEED; random if not given, and reported.
    seed: int | None
    # Each defaults to the model's own; temperature 0 is greedy.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    greedy: bool
    # Longest audio allowed; a result cut by it has finish_reason "length".
    max_seconds: float | None
    # How often, up to MAX_RETRIES, to try a piece again, with a seed derived from the last, when
    # it is no speech; `Speech.retries` says how often that was. Greedy speech is always the same,
    # so it is not tried again. In a stream it delays every piece until it is finished, since what
    # has been heard cannot be taken back.
    retry: int
    # Read Markdown, links, emoji and numbers as a person would, which needs the extra `text`;
    # numbers only for a voice whose language is known.
    normalise: bool
    # Seconds of silence between sentences where two pieces of a long text meet; twice that
    # between paragraphs.
    pause_s: float


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raise TypeError for a name that is no option."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(
                f"there is no option {name!r}; there are: {', '.join(Options.__annotations__)}"
            )


def seed_of(options: Options) -> int:
    """The seed asked for, else a random one. WarbleError for one out of range."""
    seed = options.get("seed")
    if seed is None:
        return secrets.randbelow(MAX_SEED + 1)
    if not 0 <= seed <= MAX_SEED:
        raise WarbleError(f"seed must lie in 0 … {MAX_SEED}, not {seed}")
    return seed


def sampling_of(options: Options, default: Sampling) -> Sampling:
    """The model's `default` with what was asked for in its place."""
    temperature, top_p, top_k = (
        options.get("temperature"),
        options.get("top_p"),
        options.get("top_k"),
    )
    chosen = replace(
        default,
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
        top_k=default.top_k if top_k is None else top_k,
    )
    if not (math.isfinite(chosen.temperature) and chosen.temperature >= 0):
        raise WarbleError(f"temperature must be 0 or more, not {chosen.temperature}")
    if not 0 <= chosen.top_p <= 1:
        raise WarbleError(f"top_p must lie in 0 … 1, not {chosen.top_p}")
    if not 0 <= chosen.top_k < 2**31:
        raise WarbleError(f"top_k must be 0 or more, not {chosen.top_k}")
    return replace(chosen, temperature=0.0) if options.get("greedy") else chosen


def longest_of(options: Options, frame_rate_hz: float) -> int | None:
    """Frames of the longest speech allowed; None if nothing was said about it."""
    seconds = options.get("max_seconds")
    if seconds is None:
        return None
    if not (math.isfinite(seconds) and seconds > 0):
        raise BudgetError(f"max_seconds must be more than 0, not {seconds}")
    return math.ceil(min(seconds, 1e6) * frame_rate_hz)


def retry_of(options: Options) -> int:
    """How many further attempts are allowed."""
    retry = options.get("retry", 0)
    if not 0 <= retry <= MAX_RETRIES:
        raise WarbleError(f"retry must lie in 0 … {MAX_RETRIES}, not {retry}")
    return retry


def pause_of(options: Options) -> float:
    """Seconds of silence between sentences."""
    pause_s = options.get("pause_s", DEFAULT_PAUSE_S)
    if not (math.isfinite(pause_s) and 0 <= pause_s <= LONGEST_BREAK_S):
        raise WarbleError(f"pause_s must lie in 0 … {LONGEST_BREAK_S:.0f}, not {pause_s}")
    return pause_s
