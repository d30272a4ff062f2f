"""Kokoro-82M as plain tensor code: the synthesiser that reads the training texts aloud.

The network is a StyleTTS 2 relative: a small ALBERT and a prosody predictor give durations,
pitch and energy, a text encoder gives content, and an iSTFT generator with a harmonic source
makes 24 kHz audio. One call speaks one line of phonemes; long lines use a GPU well, so several
sentences go into one call and the predicted durations say where to cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from samples.bundled_voice.kokoro_weights import Tensors

RATE = 24_000
FRAME = 600  # samples that one step of a predicted duration lasts
_FFT, _HOP, _UPSAMPLING = 20, 5, (10, 6)
_HARMONICS = 9
_HEADS, _LAYERS = 12, 12
_ALBERT = "bert.encoder.albert_layer_groups.0.albert_layers.0."


@dataclass
class Spoken:
    """One line: samples [n] float in about [-1, 1], frames [tokens + 2] per input token, and
    pitch in hertz, two values per frame, below 10 where unvoiced."""

    samples: Tensor
    frames: Tensor
    pitch: Tensor


class Kokoro:
    """Weights on one device; `speak` is the only thing it does."""

    def __init__(self, weights: Tensors, device: str) -> None:
        self.device = torch.device(device)
        self.weights = {name: value.to(self.device) for name, value in weights.items()}
        self.window = torch.hann_window(_FFT, device=self.device)
        self.lstms = {
            name: self._lstm(name)
            for name in (
                "text_encoder.lstm",
                "predictor.lstm",
                "predictor.shared",
                *(f"predictor.text_encoder.lstms.{i}" for i in (0, 2, 4)),
            )
        }

    def _lstm(self, name: str) -> torch.nn.LSTM:
        own = {
            key.removeprefix(name + "."): value
            for key, value in self.weights.items()
            if key.startswith(name + ".")
        }
        width = own["weight_ih_l0"].shape[1]
        lstm = torch.nn.LSTM(width, 256, batch_first=True, bidirectional=True)
        lstm.load_state_dict(own)
        return lstm.to(self.device).eval()

    @torch.no_grad()
    def speak(self, tokens: list[int], style: Tensor, speed: float) -> Spoken:
        """Speak one line of at most 510 phoneme ids.

        style: [256], the first half for timbre and the second for prosody.
        """
        if not 0 < len(tokens) <= 510:
            raise ValueError(f"a line has 1 to 510 phonemes, not {len(tokens)}")
        ids = torch.tensor([[0, *tokens, 0]], device=self.device)
        style = style.to(self.device)[None]
        timbre, prosody = style[:, :128], style[:, 128:]
        hidden = self._linear("bert_encoder", self._albert(ids))
        durations = self._duration_encoder(hidden, prosody)
        logits = self._linear(
            "predictor.duration_proj.linear_layer", self.lstms["predictor.lstm"](durations)[0]
        )
        frames = (logits.sigmoid().sum(-1) / speed).round().clamp(min=1).long()[0]
        where = torch.repeat_interleave(torch.arange(ids.shape[1], device=self.device), frames)
        shared = self.lstms["predictor.shared"](durations[:, where])[0].transpose(1, 2)
        pitch = self._curve("predictor.F0", shared, prosody)
        energy = self._curve("predictor.N", shared, prosody)
        content = self._text_encoder(ids)[:, :, where]
        return Spoken(self._decoder(content, pitch, energy, timbre), frames, pitch[0, 0])

    # ---- building blocks

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def _conv(
        self, name: str, x: Tensor, *, stride: int = 1, dilation: int = 1, padding: int = -1
    ) -> Tensor:
        weight = self.weights[name + ".weight"]
        if padding < 0:
            padding = dilation * (weight.shape[2] - 1) // 2
        return F.conv1d(x, weight, self.weights.get(name + ".bias"), stride, padding, dilation)

    def _norm(self, name: str, x: Tensor, *, eps: float = 1e-12) -> Tensor:
        weight, bias = self.weights[name + ".weight"], self.weights[name + ".bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def _adaptive(self, name: str, x: Tensor, style: Tensor) -> Tensor:
        """Instance norm whose gain and offset come from the style."""
        gain, offset = self._linear(name + ".fc", style)[..., None].chunk(2, dim=1)
        return torch.addcmul(offset, 1 + gain, F.instance_norm(x))

    def _snake(self, name: str, x: Tensor) -> Tensor:
        alpha = self.weights[name]
        return torch.addcdiv(x, torch.sin(alpha * x).square(), alpha)

    def _style_block(self, name: str, x: Tensor, style: Tensor) -> Tensor:
        """Two convolutions with adaptive norms; doubles the length where it has a `pool`."""
        pool = self.weights.get(name + ".pool.weight")
        out = F.leaky_relu(self._adaptive(name + ".norm1", x, style), 0.2)
        if pool is not None:
            bias = self.weights[name + ".pool.bias"]
            out = F.conv_transpose1d(out, pool, bias, 2, 1, 1, groups=pool.shape[0])
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        out = self._conv(name + ".conv1", out)
        out = self._conv(
            name + ".conv2", F.leaky_relu(self._adaptive(name + ".norm2", out, style), 0.2)
        )
        if name + ".conv1x1.weight" in self.weights:
            x = self._conv(name + ".conv1x1", x)
        return (out + x) * math.sqrt(0.5)

    # ---- encoders

    def _albert(self, ids: Tensor) -> Tensor:
        table = "bert.embeddings."
        x = (
            self.weights[table + "word_embeddings.weight"][ids]
            + self.weights[table + "position_embeddings.weight"][: ids.shape[1]]
            + self.weights[table + "token_type_embeddings.weight"][0]
        )
        x = self._linear(
            "bert.encoder.embedding_hidden_mapping_in", self._norm(table + "LayerNorm", x)
        )
        for _ in range(_LAYERS):
            query, key, value = (
                self._linear(f"{_ALBERT}attention.{part}", x)
                .unflatten(-1, (_HEADS, -1))
                .transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            x = self._norm(
                _ALBERT + "attention.LayerNorm",
                x + self._linear(_ALBERT + "attention.dense", mixed),
            )
            inner = F.gelu(self._linear(_ALBERT + "ffn", x), approximate="tanh")
            x = self._norm(
                _ALBERT + "full_layer_layer_norm", x + self._linear(_ALBERT + "ffn_output", inner)
            )
        return x

    def _duration_encoder(self, x: Tensor, style: Tensor) -> Tensor:
        repeated = style[:, None].expand(-1, x.shape[1], -1)
        x = torch.cat([x, repeated], -1)
        for i in (0, 2, 4):
            name = "predictor.text_encoder.lstms."
            x = self.lstms[f"{name}{i}"](x)[0]
            gain, offset = self._linear(f"{name}{i + 1}.fc", style)[:, None].chunk(2, dim=-1)
            x = torch.addcmul(offset, 1 + gain, F.layer_norm(x, x.shape[-1:]))
            x = torch.cat([x, repeated], -1)
        return x

    def _text_encoder(self, ids: Tensor) -> Tensor:
        x = self.weights["text_encoder.embedding.weight"][ids].transpose(1, 2)
        for i in range(3):
            name = f"text_encoder.cnn.{i}."
            x = self._conv(name + "0", x).transpose(1, 2)
            gain, offset = self.weights[name + "1.gamma"], self.weights[name + "1.beta"]
            x = F.leaky_relu(F.layer_norm(x, x.shape[-1:], gain, offset), 0.2).transpose(1, 2)
        return self.lstms["text_encoder.lstm"](x.transpose(1, 2))[0].transpose(1, 2)

    def _curve(self, name: str, x: Tensor, style: Tensor) -> Tensor:
        for i in range(3):
            x = self._style_block(f"{name}.{i}", x, style)
        return self._conv(name + "_proj", x)

    # ---- decoder

    def _decoder(self, content: Tensor, pitch: Tensor, energy: Tensor, style: Tensor) -> Tensor:
        curves = [
            self._conv("decoder.F0_conv", pitch, stride=2),
            self._conv("decoder.N_conv", energy, stride=2),
        ]
        x = self._style_block("decoder.encode", torch.cat([content, *curves], 1), style)
        residual = self._conv("decoder.asr_res.0", content)
        for i in range(4):
            x = self._style_block(
                f"decoder.decode.{i}", torch.cat([x, residual, *curves], 1), style
            )
        return self._generator(x, style, pitch)

    def _generator(self, x: Tensor, style: Tensor, pitch: Tensor) -> Tensor:
        source = self._harmonic_source(pitch)
        spectrum = torch.stft(source, _FFT, _HOP, _FFT, self.window, return_complex=True)
        harmonics = torch.cat([spectrum.abs(), spectrum.angle()], 1)
        for level, rate in enumerate(_UPSAMPLING):
            name = "decoder.generator."
            noise = f"{name}noise_convs.{level}"
            if level == 0:
                added = self._conv(
                    noise, harmonics, stride=_UPSAMPLING[1], padding=(_UPSAMPLING[1] + 1) // 2
                )
            else:
                added = self._conv(noise, harmonics)
            added = self._residual(f"{name}noise_res.{level}", added, style)
            weight = self.weights[f"{name}ups.{level}.weight"]
            x = F.conv_transpose1d(
                F.leaky_relu(x, 0.1),
                weight,
                self.weights[f"{name}ups.{level}.bias"],
                rate,
                (weight.shape[2] - rate) // 2,
            )
            if level == 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + added
            x = (
                sum(
                    (
                        self._residual(f"{name}resblocks.{3 * level + i}", x, style)
                        for i in range(3)
                    ),
                    torch.zeros((), device=x.device),
                )
                / 3
            )
        x = self._conv("decoder.generator.conv_post", F.leaky_relu(x))
        half = _FFT // 2 + 1
        magnitude, phase = x[:, :half].exp(), x[:, half:].sin()
        return torch.istft(torch.polar(magnitude, phase), _FFT, _HOP, _FFT, self.window)[0]

    def _residual(self, name: str, x: Tensor, style: Tensor) -> Tensor:
        for i, dilation in enumerate((1, 3, 5)):
            out = self._snake(f"{name}.alpha1.{i}", self._adaptive(f"{name}.adain1.{i}", x, style))
            out = self._conv(f"{name}.convs1.{i}", out, dilation=dilation)
            out = self._snake(
                f"{name}.alpha2.{i}", self._adaptive(f"{name}.adain2.{i}", out, style)
            )
            x = x + self._conv(f"{name}.convs2.{i}", out)
        return x

    def _harmonic_source(self, pitch: Tensor) -> Tensor:
        """Nine harmonics of the pitch curve [1, 1, t] in hertz; noise where it is unvoiced."""
        scale = float(math.prod(_UPSAMPLING) * _HOP)
        voiced = F.interpolate((pitch > 10).float(), scale_factor=scale, mode="nearest")
        orders = torch.arange(1, _HARMONICS + 1, device=pitch.device)[None, :, None]
        turns = (pitch * orders / RATE) % 1
        phase = torch.cumsum(turns, -1) * (2 * math.pi * scale)
        sines = 0.1 * torch.sin(F.interpolate(phase, scale_factor=scale, mode="linear"))
        level = voiced * 0.003 + (1 - voiced) * (0.1 / 3)
        waves = sines * voiced + level * torch.randn_like(sines)
        merged = self._linear("decoder.generator.m_source.l_linear", waves.transpose(1, 2))
        return torch.tanh(merged)[..., 0]
