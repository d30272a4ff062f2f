"""Stage 3: all sentences to codes.

The result is one file `codes.npz`: `codes` int16 [books, frames of all]; `ends`, `line` and
`speaker` int64 [sentences]; `rough` bool [sentences], true for what serves as reference only.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from samples.bundled_voice.audio import roughened, source_samples, to_codec_rate
from samples.bundled_voice.casting import FIRST_PASSING
from samples.bundled_voice.codec_net import Codec
from samples.bundled_voice.pool import Pool
from samples.bundled_voice.progress import log
from samples.bundled_voice.settings import FRAME, Settings
from samples.bundled_voice.stored import load

_GRID = 16  # frames that lengths are rounded up to, so that few shapes occur
_SHIFT = 1100  # samples that a further take may begin later; the silence in front has 1440


def encode(settings: Settings, shards: Path, codec: Path, out: Path, device: torch.device) -> None:
    """Encode every sentence of the shards with the trained codec, `settings.takes` times over.

    A further take begins a part of a frame later, so its codes differ all along: the DualAR finds
    it harder to learn them by heart. What passing speakers say is encoded once more as people's
    clips sound.
    """
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    network = Codec(settings.config).to(device).eval()
    network.load_state_dict(load(codec))
    pool = Pool(shards, device, settings.hours)
    pool.poll()
    pool.report()
    rng = np.random.default_rng(1)
    count = len(pool.length)
    passing = np.flatnonzero(pool.speaker >= FIRST_PASSING)
    sentence = np.concatenate([np.tile(np.arange(count), settings.takes), passing])
    rough = np.arange(len(sentence)) >= settings.takes * count
    shift = rng.integers(0, _SHIFT, len(sentence))
    shift[:count] = 0
    starts, lengths = pool.start[sentence] + shift, pool.length[sentence] - shift
    frames = -(-(lengths * 147 // 80) // FRAME)
    order = np.argsort(frames, kind="stable")
    found: list[np.ndarray] = [np.zeros(0)] * len(order)  # type: ignore[type-arg]
    began = time.monotonic()
    done = 0
    with torch.no_grad():
        while done < len(order):
            width = -(-int(frames[order[done]]) // _GRID) * _GRID
            rows = order[done : done + max(1, settings.encode_frames // width)]
            rows = rows[frames[rows] <= width]
            done += len(rows)
            begin = torch.from_numpy(starts[rows]).to(device)[:, None]
            end = begin + torch.from_numpy(lengths[rows]).to(device)[:, None]
            stretch = pool.stretch(begin, end, source_samples(width * FRAME))
            sound = to_codec_rate(stretch)[:, : width * FRAME]
            if rough[rows].any():
                which = torch.from_numpy(rough[rows]).to(device)[:, None]
                sound = torch.where(which, roughened(sound), sound)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                codes = network.quantised(network.latent(sound))[1]
            values = codes.to(torch.int16).cpu().numpy()
            for row, own in zip(rows, values, strict=True):
                found[row] = own[:, : frames[row]]
    codes_of_all = np.concatenate(found, 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial.npz")
    line, speaker = pool.line[sentence], pool.speaker[sentence]
    ends = np.cumsum(frames)
    np.savez(partial, codes=codes_of_all, ends=ends, line=line, speaker=speaker, rough=rough)
    partial.replace(out)
    log(
        f"encoded {len(order)} sentences, {codes_of_all.shape[1]} frames in"
        f" {time.monotonic() - began:.0f} s; perplexities {perplexities(codes_of_all)}"
    )


def perplexities(codes: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    """How many entries of each book are in use, as if equally often."""
    result = []
    for own in codes:
        share = np.bincount(own) / len(own)
        share = share[share > 0]
        result.append(round(float(np.exp(-(share * np.log(share)).sum()))))
    return result
