"""Signal work on tensors: resampling, pitch scale, and the rooms and noises of training."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from samples.bundled_voice.settings import HIGHEST_HZ, LOWEST_HZ, PITCH_BINS, SAMPLE_RATE

RATE = 24_000
TRACK = 300  # samples at 24 kHz that one value of a phone or pitch track lasts
_UP, _DOWN = 147, 80  # 24 kHz to 44.1 kHz
_TAPS = 16


def warped(samples: Tensor, tracks: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Play faster by a factor: samples [n] by windowed sinc, tracks [k, n / TRACK] by nearest."""
    if factor == 1.0:
        return samples, tracks
    length = int(len(samples) / factor)
    where = torch.arange(length, device=samples.device, dtype=torch.float64) * factor
    centre = where.floor().long()
    offsets = torch.arange(-_TAPS + 1, _TAPS + 1, device=samples.device)
    distance = (where - centre)[:, None] - offsets
    cut = min(1.0, 1 / factor)
    window = torch.cos(distance * (math.pi / 2 / (_TAPS + 1))).square()
    kernel = (torch.sinc(distance * cut) * window * cut).float()
    padded = F.pad(samples, (_TAPS, 2 * _TAPS))
    out = (padded[centre[:, None] + offsets + _TAPS] * kernel).sum(1)
    steps = torch.arange(int(tracks.shape[1] / factor), device=tracks.device)
    nearest = ((steps + 0.5) * factor).long().clamp_max(tracks.shape[1] - 1)
    return out, tracks[:, nearest]


def pitch_bins(hertz: Tensor) -> Tensor:
    """0 where unvoiced, else 1 .. PITCH_BINS - 1 on a logarithmic scale."""
    place = torch.log(hertz.clamp_min(1.0) / LOWEST_HZ) / math.log(HIGHEST_HZ / LOWEST_HZ)
    bins = (1 + place * (PITCH_BINS - 1)).floor().clamp(1, PITCH_BINS - 1)
    return torch.where(hertz > LOWEST_HZ * 0.7, bins, torch.zeros_like(bins)).long()


@lru_cache(maxsize=4)
def _polyphase(device: str) -> Tensor:
    """One filter per output phase: [147, 1, taps]."""
    span = torch.arange(-_TAPS, _TAPS + 1 + _DOWN, dtype=torch.float64)
    rows = []
    for phase in range(_UP):
        distance = phase * _DOWN / _UP - span
        window = torch.where(
            distance.abs() < _TAPS, torch.cos(distance * math.pi / 2 / _TAPS).square(), 0.0
        )
        rows.append(torch.sinc(distance) * window)
    return torch.stack(rows).float()[:, None].to(device)


def to_codec_rate(samples: Tensor) -> Tensor:
    """24 kHz [batch, n] to 44.1 kHz [batch, n * 147 // 80]; n is a multiple of 80."""
    kernel = _polyphase(str(samples.device))
    padded = F.pad(samples[:, None], (_TAPS, _TAPS + 1 + _DOWN))
    phases = F.conv1d(padded, kernel, stride=_DOWN)
    return phases.transpose(1, 2).flatten(1)[:, : samples.shape[1] * _UP // _DOWN]


def source_samples(count: int) -> int:
    """How many samples at 24 kHz `to_codec_rate` needs for at least `count` at 44.1 kHz."""
    return (-(-count // _UP) + 1) * _DOWN


def roughened(samples: Tensor) -> Tensor:
    """Other loudness for all; a tilted spectrum, a band limit, a room or some noise for a part.

    samples: [batch, n], likewise the result. Each row has its own.

    What is measured of the codec is how it keeps what it heard, so this goes into both its input
    and its target. The DualAR hears references like that: people's clips are.
    """
    batch, length = samples.shape
    device = samples.device

    def drawn(low: float, high: float) -> Tensor:
        return torch.empty(batch, 1, device=device).uniform_(low, high)

    size = -(-(length + SAMPLE_RATE // 4) // 4096) * 4096  # a size that FFTs like
    spectrum = torch.fft.rfft(samples, size)
    hertz = torch.linspace(0, SAMPLE_RATE / 2, spectrum.shape[1], device=device)[None]
    octaves = torch.log2((hertz + 60) / 1000).clamp(-4, 4)
    tilted = drawn(0, 1) < 0.4
    slope = torch.where(tilted, drawn(-2.5, 2.5), torch.zeros_like(tilted, dtype=torch.float32))
    edge = torch.where(drawn(0, 1) < 0.25, drawn(3500, 8000), 2.0 * SAMPLE_RATE)
    response = 10 ** (slope * octaves / 20) / (1 + (hertz / edge) ** 24).sqrt()
    decay = drawn(0.02, 0.12)
    time = torch.arange(SAMPLE_RATE // 4, device=device)[None] / SAMPLE_RATE
    room = torch.randn(batch, SAMPLE_RATE // 4, device=device) * torch.exp(-time / decay)
    room = room / room.square().sum(1, keepdim=True).sqrt().clamp_min(1e-6)
    wet = torch.where(drawn(0, 1) < 0.15, drawn(0.1, 0.5), torch.zeros(batch, 1, device=device))
    transfer = response * (1 + wet * torch.fft.rfft(room, size))
    out = torch.fft.irfft(spectrum * transfer, size)[:, :length]
    level = out.square().mean(1, keepdim=True).sqrt()
    noisy = torch.where(
        drawn(0, 1) < 0.12, 10 ** drawn(-2.2, -1.2), torch.zeros(batch, 1, device=device)
    )
    out = out + noisy * level * torch.randn_like(out)
    return (out * 10 ** (drawn(-7, 5) / 20)).clamp(-1, 1)
