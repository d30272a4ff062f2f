"""How a token is chosen from scores: the reference's filter, its race, its repetition rescue.

Order of the reference, all of it in float32 here:

1. sort descending, cumulate the softmax of the *untempered* scores; a candidate stays if the sum
   *including itself* is at most top_p and its rank is below top_k. The best always stays; the
   one that crosses top_p goes (most libraries keep it);
2. divide by the temperature (at least 1e-5), softmax;
3. exponential race: with u uniform in [0, 1) per entry, the largest p / -ln(u) wins. An entry
   with u = 0 never wins.

Repetition rescue (RAS), semantic token only: a second candidate is always drawn with the
model's own top_p and temperature, and replaces the first if that one was emitted recently.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from warble_mlx.layers import places

MIN_TEMPERATURE = 1e-5
NOTHING = 2**32 - 1  # in the repetition window: no index


class Settings(NamedTuple):
    """Sampling settings as arrays, one entry per row, so that changing them never retraces."""

    top_k: mx.array  # int32 [B]
    top_p: mx.array  # float32 [B]
    temperature: mx.array  # float32 [B]


class Ranking(NamedTuple):
    """Scores [..., V] in descending order, and the probability mass up to each of them."""

    order: mx.array  # index of each rank
    scores: mx.array
    mass: mx.array  # cumulative softmax, this rank included


def rank(scores: mx.array) -> Ranking:
    """Sort scores, float32 [..., V], in descending order (equal scores by index).

    Written so that all but sort, gather and sum melts into the expressions around it.
    """
    below = -scores
    order = mx.argsort(below, axis=-1)
    below = mx.take_along_axis(below, order, axis=-1)
    running = mx.cumsum(mx.exp(below[..., :1] - below), axis=-1)
    return Ranking(order, -below, running / running[..., -1:])


def kept(ranking: Ranking, top_k: mx.array, top_p: mx.array) -> mx.array:
    """Which ranks survive the filter, bool [..., V]; settings broadcast to [...]."""
    place = places(ranking.order.shape[-1])
    within = (ranking.mass <= top_p[..., None]) & (place < top_k[..., None])
    return within | (place == 0)


def race(ranking: Ranking, settings: Settings, uniforms: mx.array) -> mx.array:
    """Draw one index, uint32 [...], per row; `uniforms` [..., V] is by index, not by rank.

    Settings and uniforms may have leading dimensions that the ranking lacks (several draws).
    """
    temperature = mx.maximum(settings.temperature, MIN_TEMPERATURE)[..., None]
    keep = kept(ranking, settings.top_k, settings.top_p)
    tempered = mx.where(keep, ranking.scores / temperature, -mx.inf)
    order = mx.broadcast_to(ranking.order, uniforms.shape)
    waiting = -mx.log(mx.take_along_axis(uniforms, order, axis=-1))
    # The logarithm of p / waiting without the softmax's denominator, which is the same for all.
    winner = mx.argmax(tempered - mx.log(waiting), axis=-1, keepdims=True)
    return mx.take_along_axis(order, winner, axis=-1).squeeze(-1)


def choose_code(logits: mx.array, settings: Settings, uniforms: mx.array) -> mx.array:
    """A code of books 1..9, uint32 [B], from logits and uniforms [B, C]."""
    return race(rank(logits), settings, uniforms)


def choose_semantic(
    logits: mx.array,
    settings: Settings,
    rescue: Settings,
    uniforms: mx.array,
    recent: mx.array,
) -> mx.array:
    """The semantic index, uint32 [B], 0..C - 1 or C for EOS.

    logits [B, C + 1]; uniforms [2, B, C + 1], the regular and the rescue draw, both always
    consumed; recent [B, W] uint32, the window of emitted indices (NOTHING matches none). EOS is
    never rescued.
    """
    both = Settings(*(mx.stack(list(pair)) for pair in zip(settings, rescue, strict=True)))
    regular, other = race(rank(logits), both, uniforms)
    eos = logits.shape[-1] - 1
    repeated = (recent == regular[:, None]).any(axis=-1) & (regular != eos)
    return mx.where(repeated, other, regular)


def remember(recent: mx.array, chosen: mx.array, frame: mx.array) -> mx.array:
    """The window after a choice: [B, W] shifted by chosen [B].

    The reference never records the first token (frame 0): its window is created after it.
    """
    if recent.shape[1] == 0:
        return recent
    shifted = mx.concatenate([recent[:, 1:], chosen[:, None]], axis=1)
    return mx.where((frame > 0)[:, None], shifted, recent)
