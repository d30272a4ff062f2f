"""The eager loop: left-padded rows, KV caches, one frame after the other until EOS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from reference.sampling import Sampling, choose, choose_semantic, remember
from reference.transformer import Cache, DualAR

Advance = Callable[[Tensor, Tensor, Tensor, Tensor, list[Cache]], Tensor]
"""`DualAR.advance`, or the same compiled."""


class Noise(NamedTuple):
    """Uniform numbers in [0, 1): semantic draws [frames, 2, B, C + 1], codes [frames, 9, B, C]."""

    semantic: Tensor
    codes: Tensor


@dataclass
class Trace:
    """What was computed on the way: lists over steps of tensors with a row per prompt."""

    hidden: list[Tensor] = field(default_factory=list)  # [B, D] before the final norm
    normed: list[Tensor] = field(default_factory=list)  # [B, D]
    semantic_logits: list[Tensor] = field(default_factory=list)  # [B, C + 1]
    fast_logits: list[Tensor] = field(default_factory=list)  # [B, 9, C]


class Result(NamedTuple):
    """Codes [B, 10, F], -1 after a row's end; which rows ended by EOS."""

    codes: Tensor
    lengths: list[int]
    finished: list[bool]


class Prefilled(NamedTuple):
    """The slow AR after the prompts."""

    hidden: Tensor  # [B, D], un-normed
    keys: Tensor  # bool [B, S]
    position: Tensor  # [B], RoPE position of the first frame
    slot: int  # cache slot of the first frame
    caches: list[Cache]


def pad_left(prompts: list[Tensor], pad_id: int) -> tuple[Tensor, Tensor]:
    """Columns [11, T_i] as one batch [B, 11, T] and its mask [B, T]."""
    longest = max(p.shape[1] for p in prompts)
    columns = prompts[0].new_zeros(len(prompts), prompts[0].shape[0], longest)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool, device=columns.device)
    columns[:, 0] = pad_id
    for row, prompt in enumerate(prompts):
        columns[row, :, longest - prompt.shape[1] :] = prompt
        mask[row, longest - prompt.shape[1] :] = True
    return columns, mask


def prefill(model: DualAR, columns: Tensor, mask: Tensor, room: int) -> Prefilled:
    """Read prompts [B, 11, T] with mask [B, T]; `room` is the number of slots kept for frames."""
    rows, _, length = columns.shape
    keys = torch.cat([mask.bool(), mask.new_ones(rows, room).bool()], dim=1)
    caches = model.slow_caches(rows, length + room)
    counted = mask.long().cumsum(dim=1)
    slots = torch.arange(length, device=columns.device)
    positions = (counted - 1).clamp(min=0)
    hidden = model.advance(model.embed(columns), slots, positions, keys, caches)
    return Prefilled(hidden[:, -1], keys, counted[:, -1], length, caches)


def empty_window(model: DualAR, rows: int) -> Tensor:
    """The repetition window before anything was emitted."""
    width = model.config.ras_window_size
    return torch.full((rows, width), -1, device=model.embeddings.weight.device)


def rescue_of(model: DualAR, settings: Sampling | None) -> Sampling:
    """Settings of the rescue draw: the request's top_k with the model's own other two."""
    c = model.config
    return Sampling((settings or Sampling()).top_k, c.ras_top_p, c.ras_temperature)


def fast_frame(
    model: DualAR,
    normed: Tensor,
    hidden: Tensor,
    semantic: Tensor,
    settings: Sampling | None,
    uniforms: Tensor | None,
    caches: list[Cache],
) -> tuple[Tensor, list[Tensor]]:
    """The ten codes [B, 10] of a frame and the nine logits [B, C] behind codes 1..9.

    Ten steps: the slow AR's output, whose logits nobody uses, then codes 0..8.
    """
    c = model.config
    model.fast_advance(model.fast_input(normed, hidden), 0, caches)
    codes, scores = [semantic.clamp(max=c.codebook_size - 1)], []
    for position in range(1, c.num_codebooks):
        x = model.fast_embeddings(codes[-1])[:, None]
        logits = model.fast_advance(x, position, caches)
        draw = None if uniforms is None else uniforms[position - 1]
        codes.append(choose(logits, settings, draw))
        scores.append(logits)
    return torch.stack(codes, dim=1), scores


@torch.no_grad()
def generate(
    model: DualAR,
    columns: Tensor,
    mask: Tensor,
    max_frames: int,
    settings: Sampling | None = None,
    noise: Noise | None = None,
    *,
    trace: Trace | None = None,
    advance: Advance | None = None,
    ignore_eos: bool = False,
    room: int | None = None,
) -> Result:
    """Frames for prompts [B, 11, T] with mask [B, T], greedy unless `settings` are given.

    Without `noise` the numbers come from torch's generator. `advance` replaces the slow step of
    single positions. With `ignore_eos` every row gets max_frames frames, whatever they hold. `room`
    is the number of cache slots kept for frames, by default as many as are wanted.
    """
    c, rows = model.config, columns.shape[0]
    max_frames = min(max_frames, c.max_seq_len - columns.shape[2])
    step = model.advance if advance is None else advance
    state = prefill(model, columns, mask, max_frames if room is None else room)
    hidden, recent = state.hidden, empty_window(model, rows)
    fast_caches = model.fast_caches(rows)
    finished = torch.zeros(rows, dtype=torch.bool, device=columns.device)
    frames: list[Tensor] = []
    for t in range(max_frames):
        normed = model.norm(hidden)
        logits = model.semantic_logits(normed)
        drawn = _drawn(model, rows, t, noise) if settings else None
        semantic = choose_semantic(
            logits, settings, rescue_of(model, settings), drawn and drawn[0], recent
        )
        recent = remember(recent, semantic, t)
        codes, scores = fast_frame(
            model, normed, hidden, semantic, settings, drawn and drawn[1], fast_caches
        )
        if trace is not None:
            trace.hidden.append(hidden)
            trace.normed.append(normed)
            trace.semantic_logits.append(logits)
            trace.fast_logits.append(torch.stack(scores, dim=1))
        if not ignore_eos:
            finished = finished | (semantic == c.codebook_size)
        if finished.all():  # the host waits for the device here
            break
        frames.append(torch.where(finished[:, None], -1, codes))
        if t + 1 < max_frames:
            x = (model.head[semantic] + model.sum_of_codes(codes))[:, None]
            slots = torch.tensor([state.slot + t], device=columns.device)
            positions = (state.position + t)[:, None]
            hidden = step(x, slots, positions, state.keys, state.caches)[:, -1]
    return _result(frames, finished, c.num_codebooks)


def _drawn(model: DualAR, rows: int, t: int, noise: Noise | None) -> tuple[Tensor, Tensor]:
    if noise is not None:
        return noise.semantic[t], noise.codes[t]
    c, device = model.config, model.embeddings.weight.device
    semantic = torch.rand(2, rows, c.head_rows, device=device)
    return semantic, torch.rand(c.num_codebooks - 1, rows, c.codebook_size, device=device)


def _result(frames: list[Tensor], finished: Tensor, books: int) -> Result:
    if frames:
        codes = torch.stack(frames, dim=2)
    else:
        codes = torch.zeros(len(finished), books, 0, dtype=torch.long, device=finished.device)
    lengths = (codes[:, 0] >= 0).sum(dim=1).tolist()
    return Result(codes, lengths, finished.tolist())
