"""`vocoder.mlpackage` and `post_module.mlpackage`: written, then evaluated against the runtime."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch

from warble_mlx.config import NUM_CODEBOOKS, ModelConfig
from warble_mlx.ios_export.checks import at_least, at_most, decibels, equal
from warble_mlx.ios_export.coreml_convert import Input, join, to_package
from warble_mlx.ios_export.coreml_static import operation_count, package_checks
from warble_mlx.ios_export.job import Job
from warble_mlx.ios_export.manifest import Check
from warble_mlx.ios_export.mil_eval import Program
from warble_mlx.ios_export.torch_codec import PostModule, Vocoder, extents
from warble_mlx.ios_export.torch_layers import Weights
from warble_mlx.safetensors_file import read_header, to_float32
from warble_mlx.weights import DECODER_FILE

VOCODER = "vocoder.mlpackage"
POST_MODULE = "post_module.mlpackage"
FUNCTIONS = {"first": 1, "stream": 7}  # frames of each call
RANGE_LIMIT = 3e4  # float16 ends at 65,504
LATENTS_LIMIT_DB = 50.0
AUDIO_LIMIT_DB = 50.0
FIRST_LIMIT_DB = 40.0  # of the worst single frame
QUIET = 0.1  # of the whole's level: a difference is not compared with less signal than this
WHERE = "MIL evaluator"

Samples = npt.NDArray[np.float32]


def decoder_weights(bundle: Path) -> Weights:
    """Tensors of a bundle's decoder file by name, widened to float32."""
    header = read_header(bundle / DECODER_FILE)
    return lambda name: to_float32(header.read(name), header.entries[name].dtype)


def write_packages(job: Job, folder: Path) -> None:
    """Convert both halves of the decoder, each with the functions `first` and `stream`."""
    config, weights = job.config, decoder_weights(job.bundle)
    dim, context = config.codec_latent_dim, extents()[0]
    for name, kind in ((VOCODER, Vocoder), (POST_MODULE, PostModule)):
        single = {}
        for function, frames in FUNCTIONS.items():
            job.say(f"converting {name}, {function}")
            module = kind(config, weights, frames)
            path = folder / f"{function}.mlpackage"
            if kind is Vocoder:
                inputs = [Input("latents", (1, dim, context + frames)), Input("hist", (1,), True)]
                to_package(module, inputs, {"samples": False}, path)
            else:
                inputs = [
                    Input("codes", (1, NUM_CODEBOOKS, frames), True),
                    Input("position", (1,), True),
                ]
                states = ("past_keys", "past_values")
                to_package(module, inputs, {"latents": False}, path, states=states)
            single[function] = path
            del module
        join(single, folder / name, "stream")
        for path in single.values():
            shutil.rmtree(path)


class Evaluated(NamedTuple):
    """What the packages made of codes: latents [D, T] and samples [T * frame_size]."""

    latents: Samples
    samples: Samples


class Packages:
    """Both packages in the evaluator, run as an app runs them."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.post = {name: Program(folder / POST_MODULE, name) for name in FUNCTIONS}
        self.vocoder = {name: Program(folder / VOCODER, name) for name in FUNCTIONS}
        self.config, self.context = config, extents()[0]

    def decode(
        self, codes: npt.NDArray[np.int32], *, hist_error: int = 0, first: int = 0
    ) -> Evaluated:
        """Stream codes [10, T] with T = 1 + 7 n. `hist_error` is added to the history's length,
        for a control that must fail."""
        dim = self.config.codec_latent_dim
        history = torch.zeros(1, dim, self.context, dtype=torch.float16)
        for program in self.post.values():
            for name, value in program.state.items():
                program.state[name] = torch.zeros_like(value)
        latents, samples, at = [], [], 0
        while at < codes.shape[1]:
            name = "first" if at == 0 else "stream"
            frames = FUNCTIONS[name]
            part = torch.from_numpy(codes[None, :, at : at + frames].astype(np.int32))
            new = self._latents(name, part, at)
            window = torch.cat((history, new), -1)
            known = min(max(min(at, self.context) + hist_error, 0), self.context)
            hist = torch.tensor([known], dtype=torch.int32)
            wave = self.vocoder[name](latents=window, hist=hist)["samples"]
            latents.append(new[0].float().numpy())
            samples.append(wave.reshape(-1).float().numpy())
            history = window[..., -self.context :]
            at += frames
        return Evaluated(np.concatenate(latents, axis=1), np.concatenate(samples))

    def _latents(self, name: str, codes: torch.Tensor, at: int) -> torch.Tensor:
        program = self.post[name]
        result = program(codes=codes, position=torch.tensor([at], dtype=torch.int32))
        for other in self.post.values():  # one state for both functions, as on a device
            other.state = program.state
        return result["latents"]

    @property
    def peaks(self) -> dict[str, float]:
        """Largest magnitude of every value in all functions, by operation."""
        return {
            f"{program.function}: {name}": peak
            for program in (*self.post.values(), *self.vocoder.values())
            for name, peak in program.peak.items()
        }


def codec_checks(
    job: Job, folder: Path, codes: npt.NDArray[np.int32], whole: Samples
) -> Iterator[Check]:
    """Both packages against the runtime's latents and samples `whole` of the same codes."""
    for name in (POST_MODULE, VOCODER):
        yield from package_checks(folder / name)
    yield equal("transposed convolutions", operation_count(folder / VOCODER, "conv_transpose"), 0)
    stored = sum(e.nbytes for e in read_header(job.bundle / DECODER_FILE).entries.values())
    written = sum(
        path.stat().st_size
        for name in (POST_MODULE, VOCODER)
        for path in (folder / name).rglob("*")
        if path.is_file()
    )
    # Projected codebooks are wider than the books; programs of both functions.
    books = job.config.codec_semantic_codebook_size
    books += (NUM_CODEBOOKS - 1) * job.config.codec_residual_codebook_size
    allowance = 4_000_000 + books * job.config.codec_latent_dim * 2
    yield at_most("size of both codec packages", written, stored + allowance, "bytes")
    packages = Packages(folder, job.config)
    found = packages.decode(codes)
    frame_size = job.config.codec_frame_size
    yield from accuracy_checks(found, runtime_latents(job, codes), whole, frame_size)
    yield range_check("largest value in the codec packages", packages.peaks)


def accuracy_checks(
    found: Evaluated, latents: Samples, samples: Samples, frame_size: int
) -> list[Check]:
    """Latents and samples against the runtime's, in dB: as a whole, and frame by frame where
    history is missing."""
    first = first_frames_decibels(found.samples, samples, frame_size)
    return [
        at_least(
            "latents of post_module", decibels(found.latents, latents), LATENTS_LIMIT_DB, "dB",
            where=WHERE,
        ),
        at_least(
            "audio of post_module and vocoder", decibels(found.samples, samples), AUDIO_LIMIT_DB,
            "dB", where=WHERE,
        ),
        at_least("audio of the worst first frame", first, FIRST_LIMIT_DB, "dB", where=WHERE),
    ]  # fmt: skip


def first_frames_decibels(found: Samples, wanted: Samples, frame_size: int) -> float:
    """Signal over difference, in dB, of the worst among the frames that have fewer frames before
    them than the vocoder has history; samples [T * frame_size].

    A wrong `hist` shows in these alone, and sound that starts from silence drowns it in the whole.
    """
    ends = range(frame_size, len(wanted) + 1, frame_size)[: extents()[0]]
    frames = [slice(end - frame_size, end) for end in ends]
    least = QUIET * float(np.sqrt(np.mean(wanted.astype(np.float64) ** 2)))
    return float(np.min([decibels(found[f], wanted[f], least=least) for f in frames]))


def range_check(name: str, peaks: dict[str, float]) -> Check:
    """The largest value stays inside float16; what is not a number is the largest of all."""
    largest = max(peaks, key=lambda n: peaks[n] if peaks[n] == peaks[n] else math.inf)
    return at_most(name, peaks[largest], RANGE_LIMIT, where=WHERE, note=largest)


def runtime_latents(job: Job, codes: npt.NDArray[np.int32]) -> Samples:
    """What the runtime's post_module makes of codes [10, T] in float32: [D, T]."""
    from warble_mlx.codec import CodecDecoder
    from warble_mlx.codec.carry import Carry
    from warble_mlx.weights import load_strictly

    decoder = CodecDecoder(job.config)
    load_strictly(decoder, job.bundle / DECODER_FILE, mx.float32, {})
    quantizer = decoder.quantizer
    latents = quantizer.post_module(quantizer.dequantize(mx.array(codes[None])), Carry())
    return np.ascontiguousarray(np.array(latents)[0].T)


def whole_chunks(count: int) -> int:
    """The longest 1 + 7 n that is at most `count`, which is 1 or more."""
    return 1 + (count - 1) // FUNCTIONS["stream"] * FUNCTIONS["stream"]
