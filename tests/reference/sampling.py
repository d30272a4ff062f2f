"""How a token is chosen from scores. All of it in float32, whatever the model's dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5


class Sampling(NamedTuple):
    """The published defaults."""

    top_k: int = 50
    top_p: float = 0.9
    temperature: float = 0.7


def filtered(scores: Tensor, settings: Sampling) -> Tensor:
    """Scores [..., V] with everything but the candidates at -inf, over the temperature.

    In descending order a candidate goes if the softmax of the untempered scores, summed up to and
    including itself, exceeds top_p, or if its rank is top_k or more. The first always stays.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    gone = ((mass > settings.top_p) | (rank >= settings.top_k)) & (rank > 0)
    gone = torch.zeros_like(gone).scatter(-1, order, gone)
    return scores.masked_fill(gone, -torch.inf) / max(settings.temperature, MIN_TEMPERATURE)


def race(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from softmax(scores) [..., V] with one uniform number of [0, 1) per entry: [...].

    Entry i finishes after an exponential time with rate p[i]; the first one wins.
    """
    return (scores.softmax(dim=-1) / -uniforms.log()).argmax(dim=-1)


def choose(logits: Tensor, settings: Sampling | None, uniforms: Tensor | None) -> Tensor:
    """Index [B] from logits [B, V]: the largest, or drawn with uniforms [B, V]."""
    if settings is None or uniforms is None:
        return logits.argmax(dim=-1)
    return race(filtered(logits, settings), uniforms)


def choose_semantic(
    logits: Tensor,
    settings: Sampling | None,
    rescue: Sampling,
    uniforms: Tensor | None,
    recent: Tensor,
) -> Tensor:
    """Semantic index [B] (C = EOS) from logits [B, C + 1].

    uniforms [2, B, C + 1]: regular and rescue draw. The rescue's token is taken when the regular
    one is a semantic token in `recent` [B, W], the tokens emitted lately.
    """
    if settings is None or uniforms is None:
        return logits.argmax(dim=-1)
    regular = choose(logits, settings, uniforms[0])
    other = choose(logits, rescue, uniforms[1])
    repeated = (recent == regular[:, None]).any(dim=-1) & (regular != logits.shape[-1] - 1)
    return torch.where(repeated, other, regular)


def remember(recent: Tensor, chosen: Tensor, frame: Tensor | int) -> Tensor:
    """The window [B, W] after `chosen` [B]. The token of frame 0 is never recorded: the window
    starts to exist after it, filled with what matches nothing (-1)."""
    if recent.shape[1] == 0:
        return recent
    shifted = torch.cat([recent[:, 1:], chosen[:, None]], dim=1)
    return torch.where(torch.as_tensor(frame, device=recent.device) > 0, shifted, recent)
