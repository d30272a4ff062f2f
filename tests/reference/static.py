"""Whole frames of fixed shape: preallocated buffers, one CUDA graph, EOS read a frame late.

A frame is one function that reads and writes buffers in place and returns nothing, so that it can
be captured once and replayed without the host. On a CPU the same function is called as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.generate import Noise, Prefilled, Result, empty_window, prefill, rescue_of
from reference.sampling import Sampling, choose, choose_semantic, remember
from reference.transformer import DualAR

WARM_UP_FRAMES = 3  # before capture: libraries allocate their workspaces


class StaticEngine:
    """Frames for a fixed number of rows and cache slots, greedy or with fixed settings.

    Sampled frames draw from torch's generator inside the graph, unless noise is given to `run`.
    """

    def __init__(
        self, model: DualAR, rows: int, slots: int, settings: Sampling | None = None
    ) -> None:
        c, like = model.config, model.embeddings.weight
        device = like.device
        self.model, self.settings, self.slots = model, settings, slots
        self.rescue = rescue_of(model, settings)
        self.hidden = like.new_zeros(rows, c.dim)
        self.keys = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.position = torch.zeros(rows, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.frame = torch.zeros(1, dtype=torch.long, device=device)
        self.recent = empty_window(model, rows)
        self.caches = model.slow_caches(rows, slots)
        self.fast_caches = model.fast_caches(rows)
        # Semantic index (C = EOS), then the ten codes.
        self.emitted = torch.zeros(rows, c.num_codebooks + 1, dtype=torch.long, device=device)
        self.semantic_uniforms = torch.rand(2, rows, c.head_rows, device=device)
        self.code_uniforms = torch.rand(c.num_codebooks - 1, rows, c.codebook_size, device=device)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    # ------------------------------------------------------------------ one frame

    def _frame(self, draws: bool) -> None:
        """One frame for every row, in place. With `draws` the uniforms are drawn anew."""
        model, c = self.model, self.model.config
        sampled = self.settings is not None
        if sampled and draws:
            self.semantic_uniforms.uniform_()
            self.code_uniforms.uniform_()
        normed = model.norm(self.hidden)
        semantic = choose_semantic(
            model.semantic_logits(normed),
            self.settings,
            self.rescue,
            self.semantic_uniforms if sampled else None,
            self.recent,
        )
        # Positions 0 and 1 of the fast AR are both known by now: one pass of length two.
        codes = [semantic.clamp(max=c.codebook_size - 1)]
        x = torch.cat(
            [model.fast_input(normed, self.hidden), model.fast_embeddings(codes[0])[:, None]], dim=1
        )
        first = 0
        for book in range(1, c.num_codebooks):
            logits = model.fast_advance(x, first, self.fast_caches)
            draw = self.code_uniforms[book - 1] if sampled else None
            codes.append(choose(logits, self.settings, draw))
            x, first = model.fast_embeddings(codes[-1])[:, None], book + 1
        frame = torch.stack(codes, dim=1)
        self.emitted.copy_(torch.cat([semantic[:, None], frame], dim=1))
        self.recent.copy_(remember(self.recent, semantic, self.frame))
        x = (model.head[semantic] + model.sum_of_codes(frame))[:, None]
        hidden = model.advance(x, self.slot, self.position[:, None], self.keys, self.caches)
        self.hidden.copy_(hidden[:, -1])
        self.slot.add_(1).clamp_(max=self.slots - 1)
        self.position.add_(1).clamp_(max=c.max_seq_len - 1)
        self.frame.add_(1)

    def _step(self, draws: bool) -> None:
        if self.hidden.device.type != "cuda":
            self._frame(draws)
            return
        if draws not in self._graphs:
            self._graphs[draws] = self._captured(draws)
        self._graphs[draws].replay()

    def _captured(self, draws: bool) -> torch.cuda.CUDAGraph:
        kept = [t.clone() for t in self._buffers()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_FRAMES):
                self._frame(draws)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._frame(draws)
        for buffer, value in zip(self._buffers(), kept, strict=True):
            buffer.copy_(value)
        return graph

    def _buffers(self) -> list[Tensor]:
        small = [self.hidden, self.position, self.slot, self.frame, self.recent]
        return [*small, *(t for pair in self.caches for t in pair)]

    # ------------------------------------------------------------------ the loop

    def start(self, prompt: Prefilled) -> None:
        """Take over the state after the prompts."""
        self.hidden.copy_(prompt.hidden)
        self.keys.copy_(prompt.keys)
        self.position.copy_(prompt.position)
        self.slot.fill_(prompt.slot)
        self.frame.zero_()
        self.recent.fill_(-1)
        for pair, read in zip(self.caches, prompt.caches, strict=True):
            for buffer, value in zip(pair, read, strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def run(
        self,
        columns: Tensor,
        mask: Tensor,
        max_frames: int,
        noise: Noise | None = None,
        *,
        ignore_eos: bool = False,
    ) -> Result:
        """As `generate`; the prompt and the frames must fill the cache slots exactly or less.

        The host asks for frame t before it looks at frame t - 1, so that the device never waits;
        a frame computed after the end is dropped.
        """
        room = self.slots - columns.shape[2]
        if max_frames > room:
            raise ValueError(f"{max_frames} frames wanted, but there are slots for {room}")
        self.start(prefill(self.model, columns, mask, room))
        rows, width = self.emitted.shape
        on_gpu = self.emitted.device.type == "cuda"
        host = torch.zeros(max_frames, rows, width, dtype=torch.long, pin_memory=on_gpu)
        written: list[torch.cuda.Event] = []
        ended = torch.zeros(rows, dtype=torch.bool)
        known = 0
        for t in range(max_frames):
            if noise is not None:
                self.semantic_uniforms.copy_(noise.semantic[t])
                self.code_uniforms.copy_(noise.codes[t])
            self._step(draws=noise is None)
            host[t].copy_(self.emitted, non_blocking=on_gpu)
            if on_gpu:
                written.append(torch.cuda.Event())
                written[-1].record()
            if t == 0 or ignore_eos:
                continue
            if on_gpu:
                written[t - 1].synchronize()
            known = t
            ended |= host[t - 1, :, 0] == self.model.config.codebook_size
            if ended.all():
                break
        else:
            if on_gpu:
                torch.cuda.synchronize()
            known = max_frames
        return self._cut(host[:known].to(self.emitted.device), ignore_eos)

    def _cut(self, emitted: Tensor, ignore_eos: bool) -> Result:
        """Frames [F, B, 11] as codes [B, 10, F'] that are -1 from each row's EOS on."""
        eos = self.model.config.codebook_size
        over = (emitted[..., 0] == eos).long().cumsum(dim=0) > 0
        if ignore_eos:
            over = torch.zeros_like(over)
        codes = torch.where(over[..., None], -1, emitted[..., 1:]).permute(1, 2, 0)
        lengths = (~over).sum(dim=0)
        finished = (emitted[..., 0] == eos).any(dim=0) & over.any(dim=0)
        codes = codes[:, :, : int(lengths.max())] if len(emitted) else codes
        return Result(codes, lengths.tolist(), finished.tolist())
