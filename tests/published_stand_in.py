"""A model with the interface of the published remote code, to try its adapter on.

Names, arguments and shapes are the published ones as far as the adapter touches them; what computes
is the reference engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from reference.codec import Codec
from reference.generate import empty_window, rescue_of
from reference.sampling import Sampling, filtered, remember
from reference.transformer import DualAR
from torch import Tensor, nn


class Part(nn.Module):
    """A function of the codec as a module, so that it can be hooked."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, N] to whatever the function gives."""
        return self.function(x)


class StandIn(DualAR):
    """The published model's outside."""

    codec: Codec | None = None

    def prepare(self) -> None:
        """Tables are stored in bfloat16, as published."""
        super().prepare()
        self.freqs_cis = self.slow_rope.to(torch.bfloat16)
        self.fast_freqs_cis = self.fast_rope.to(torch.bfloat16)
        for layer in self.layers:
            layer.attention.kv_cache = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """Scores of the vocabulary [B, T, V] for columns [B, 11, T]."""
        if self.layers[0].attention.kv_cache is not None:
            raise RuntimeError("forward while caches of generate are in place")
        length = input_ids.shape[2]
        at, mask = torch.arange(length), torch.ones(1, length, dtype=torch.bool)
        caches = self.slow_caches(1, length)
        hidden = self.advance(self.embed(input_ids), at, at[None], mask, caches)
        return self.all_logits(self.norm(hidden))

    def _slow_step(
        self, input_ids: Tensor, cache_position: Tensor, position_ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.slow_rope = self.freqs_cis.float()
        caches = self.layers[0].attention.kv_cache
        keys = torch.nn.functional.pad(mask.bool(), (0, caches[0][0].shape[2] - mask.shape[1]))
        x = self.embed(input_ids)
        hidden = self.advance(x, cache_position, position_ids, keys, caches)[:, -1:]
        normed = self.norm(hidden)
        return self.all_logits(normed)[:, -1], normed

    def _fast_step(self, x: Tensor, position: int, caches: list[Any]) -> Tensor:
        rope = self.fast_freqs_cis.float()[None, position : position + 1]
        slots = torch.arange(self.config.num_codebooks)
        mask = (slots <= position)[None, None]
        for block, cache in zip(self.fast_layers, caches, strict=True):
            x = block(x, rope, slots[position : position + 1], mask, cache)
        return self.fast_output(self.fast_norm(x))[:, -1]

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        do_sample: bool,
        return_dict_in_generate: bool,
        top_k: int = 50,
        top_p: float = 0.9,
        temperature: float = 0.7,
    ) -> SimpleNamespace:
        """One row."""
        assert return_dict_in_generate
        c, length = self.config, input_ids.shape[2]
        settings = Sampling(top_k, top_p, temperature)
        caches = self.slow_caches(1, length + max_new_tokens)
        for layer in self.layers:
            layer.attention.kv_cache = caches
        fast_caches, recent = self.fast_caches(1), empty_window(self, 1)
        at = torch.arange(length)
        logits, entry = self._slow_step(input_ids, at, at[None], attention_mask)
        frames: list[Tensor] = []
        finished = False
        for t in range(max_new_tokens):
            allowed = torch.full_like(logits, -torch.inf)
            for rows in (slice(c.semantic_begin_id, c.semantic_end_id + 1), c.eos_token_id):
                allowed[:, rows] = logits[:, rows]
            semantic = self._pick(allowed, settings, do_sample)
            if do_sample:
                other = self._pick(allowed, rescue_of(self, settings), do_sample)
                repeated = (recent == semantic).any() and semantic != c.eos_token_id
                semantic = other if repeated else semantic
            recent = remember(recent, semantic, t)
            codes = [(semantic - c.semantic_begin_id).clamp(0, c.codebook_size - 1)]
            self._fast_step(entry, 0, fast_caches)
            for position in range(1, c.num_codebooks):
                x = self.fast_embeddings(codes[-1])[:, None]
                scores = self._fast_step(x, position, fast_caches)
                codes.append(self._pick(scores, settings, do_sample))
            finished = bool(semantic == c.eos_token_id)
            if finished:
                break
            frames.append(torch.stack(codes, dim=1))
            attention_mask = torch.cat([attention_mask, attention_mask[:, -1:]], dim=1)
            column = torch.cat([semantic[:, None], frames[-1]], dim=1)[..., None]
            slot = torch.tensor([length + t])
            logits, entry = self._slow_step(column, slot, slot[None], attention_mask)
        codes = torch.stack(frames, dim=2) if frames else torch.zeros(1, 10, 0, dtype=torch.long)
        lengths = torch.tensor([codes.shape[2]])
        return SimpleNamespace(codes=codes, code_lengths=lengths, finished=torch.tensor([finished]))

    @staticmethod
    def _pick(scores: Tensor, settings: Sampling, do_sample: bool) -> Tensor:
        if not do_sample:
            return scores.argmax(dim=-1)
        chances = filtered(scores, settings).softmax(dim=-1)
        drawn = torch.rand(
            chances.shape, dtype=chances.dtype, device=chances.device, generator=None
        )
        return (chances / -drawn.log()).argmax(dim=-1)

    def load_codec(self, device: str) -> SimpleNamespace:
        """The codec with the parts that are hooked."""
        assert device == "cpu"
        codec = self.codec
        if not hasattr(self, "_parts"):
            self._parts = SimpleNamespace(
                quantizer=SimpleNamespace(
                    post_module=Part(codec.latents), pre_module=Part(codec.downsampled)
                ),
                decoder=Part(codec.wave),
            )
        return self._parts

    @torch.no_grad()
    def decode_audio(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [1, 10, F] to samples [1, N] and their number."""
        parts = self.load_codec("cpu")
        wave = parts.decoder(parts.quantizer.post_module(self.codec.dequantise(codes)))
        return wave, torch.tensor([wave.shape[1]])

    @torch.no_grad()
    def encode_audio(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [1, 1, N] to codes [1, 10, F] and their number."""
        padded = torch.nn.functional.pad(audio[0], (0, -audio.shape[2] % 2048))
        latents = self.load_codec("cpu").quantizer.pre_module(self.codec.encoder(padded))
        codes, _ = self.codec.quantise(latents)
        return codes, torch.tensor([codes.shape[2]])
