"""Run an engine over a few utterances and keep everything that a bundle is held against."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from reference.generate import Noise, Result, Trace
from reference.rope import rope_table
from reference.sampling import Sampling
from warble_mlx.config import CODEC_HEAD_DIM, CODEC_ROPE_BASE, ModelConfig
from warble_mlx.verify.dump import FORMAT, Array, Case, Dump, DumpInfo, Sampled

CODEC_POSITIONS = 160
CHIRP_SAMPLES = 30_000  # no whole number of frames
REFERENCE_FRAMES = 12
SEED = 1
PUBLISHED_SETTINGS = Sampling()


class CodecRun(NamedTuple):
    """Decoding: [F, L], [4 F, L] and [2048 F]; encoding: codes and margins [10, F]."""

    dequantised: Tensor
    latents: Tensor
    wave: Tensor


class Recordable(Protocol):
    """What an engine must be able to do to be recorded."""

    config: ModelConfig
    name: str
    versions: dict[str, str]
    device: str
    dtype: str
    tf32: bool
    packed: bool
    codec_dtype: str | None

    def rope(self) -> tuple[Tensor, Tensor]:
        """Slow and fast table, float32 [positions, h / 2, 2]."""

    def prompt(self, text: str, reference_text: str | None, codes: Tensor | None) -> Tensor:
        """Columns [11, T]."""

    def prompt_pass(self, columns: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Embedding and every layer's output [T, D] of a prompt [11, T]."""

    def run(
        self,
        prompts: list[Tensor],
        frames: int,
        settings: Sampling | None,
        noise: Noise | None,
    ) -> tuple[Result, Trace]:
        """Generate for prompts [11, T_i] in one batch."""

    def decode(self, codes: Tensor) -> CodecRun:
        """Codes [10, F] to samples, with the stages between."""

    def encode(self, wave: Tensor) -> tuple[Tensor, Tensor] | None:
        """Samples [N] to codes and margins [10, F]; None if there is no encoder."""


class Utterance(NamedTuple):
    """What to say. With `reference_text` it follows frames of the first greedy utterance."""

    name: str
    text: str | None
    reference_text: str | None = None
    columns: Tensor | None = None  # instead of a text


UTTERANCES = (
    Utterance("plain", "Hello there. Is this the same model?"),
    Utterance("voiced", "One two three.", "Hello there."),
)


def record(
    engine: Recordable,
    *,
    utterances: Iterable[Utterance] = UTTERANCES,
    frames: int = 48,
    sampled_frames: int = 24,
    settings: Sampling = PUBLISHED_SETTINGS,
    checkpoint: dict[str, str] | None = None,
    seed: int = SEED,
) -> Dump:
    """Everything in one dump: greedy utterances, the first of them once more sampled with numbers
    that follow from `seed`, the codec."""
    tensors: dict[str, Array] = {}
    slow, fast = engine.rope()
    codec_rope = rope_table(CODEC_POSITIONS, CODEC_HEAD_DIM, CODEC_ROPE_BASE)
    tensors |= {"rope.slow": floats(slow), "rope.fast": floats(fast)}
    cases: list[Case] = []
    reference: Tensor | None = None
    for said in utterances:
        columns = said.columns
        if columns is None:
            assert said.text is not None
            voiced = said.reference_text is not None and reference is not None
            columns = engine.prompt(
                said.text, said.reference_text if voiced else None, reference if voiced else None
            )
        result, trace = engine.run([columns], frames, None, None)
        case = Case(
            name=said.name,
            finished=result.finished[0],
            text=said.text,
            reference_text=said.reference_text if reference is not None else None,
        )
        cases.append(case)
        tensors |= utterance_tensors(engine, case, columns, result, trace, 0)
        embedding, layers = engine.prompt_pass(columns)
        tensors[f"{said.name}.embedding"] = floats(embedding)
        tensors |= {f"{said.name}.layer.{i}": floats(x) for i, x in enumerate(layers)}
        if reference is None and result.lengths[0]:
            reference = result.codes[0, :, : min(REFERENCE_FRAMES, result.lengths[0])].cpu()
    first = cases[0]
    if sampled_frames:
        case, more = sampled_case(engine, first, tensors, sampled_frames, settings, seed)
        cases.append(case)
        tensors |= more
    if engine.codec_dtype is not None:
        tensors["rope.codec"] = floats(codec_rope)
        tensors |= codec_tensors(engine, tensors[f"{first.name}.codes"])
    return Dump(info_of(engine, cases, checkpoint or {}), tensors)


def record_batch(
    engine: Recordable, prompts: list[Tensor], frames: int, sampled_frames: int = 0
) -> Dump:
    """Greedy utterances for columns [11, T_i], generated together, without the codec. The first of
    them sampled as well, alone."""
    slow, fast = engine.rope()
    tensors = {"rope.slow": floats(slow), "rope.fast": floats(fast)}
    result, trace = engine.run(prompts, frames, None, None)
    cases = []
    for row, columns in enumerate(prompts):
        case = Case(name=f"row{row}", finished=result.finished[row])
        cases.append(case)
        tensors |= utterance_tensors(engine, case, columns, result, trace, row)
        embedding, layers = engine.prompt_pass(columns)
        tensors[f"{case.name}.embedding"] = floats(embedding)
        tensors |= {f"{case.name}.layer.{i}": floats(x) for i, x in enumerate(layers)}
    if sampled_frames:
        case, more = sampled_case(
            engine, cases[0], tensors, sampled_frames, PUBLISHED_SETTINGS, SEED
        )
        cases.append(case)
        tensors |= more
    return Dump(msgspec.structs.replace(info_of(engine, cases, {}), codec_dtype=None), tensors)


def info_of(engine: Recordable, cases: list[Case], checkpoint: dict[str, str]) -> DumpInfo:
    """The metadata."""
    return DumpInfo(
        format=FORMAT,
        engine=engine.name,
        versions=engine.versions,
        device=engine.device,
        dtype=engine.dtype,
        tf32=engine.tf32,
        checkpoint=checkpoint,
        config=engine.config,
        packed=engine.packed,
        codec_dtype=engine.codec_dtype,
        cases=cases,
    )


def utterance_tensors(
    engine: Recordable, case: Case, columns: Tensor, result: Result, trace: Trace, row: int
) -> dict[str, Array]:
    """One row of a run."""
    frames = result.lengths[row]
    steps = frames + case.finished
    found = {
        "columns": integers(columns),
        "codes": integers(result.codes[row, :, :frames]),
        "normed": stacked(trace.normed, steps, row),
        "semantic_logits": stacked(trace.semantic_logits, steps, row),
        "fast_logits": stacked(trace.fast_logits, frames, row),
    }
    if not engine.config.norm_fastlayer_input:
        found["fast_input"] = stacked(trace.hidden, steps, row)
    return {f"{case.name}.{name}": value for name, value in found.items()}


def sampled_case(
    engine: Recordable,
    first: Case,
    tensors: dict[str, Array],
    frames: int,
    settings: Sampling,
    seed: int,
) -> tuple[Case, dict[str, Array]]:
    """The first utterance again, sampled with uniforms that are kept."""
    c, random = engine.config, torch.Generator().manual_seed(seed)
    semantic = torch.rand(frames, 2, 1, c.head_rows, generator=random)
    codes = torch.rand(frames, c.num_codebooks - 1, 1, c.codebook_size, generator=random)
    columns = torch.from_numpy(tensors[f"{first.name}.columns"]).long()
    result, trace = engine.run([columns], frames, settings, Noise(semantic, codes))
    case = Case(name="sampled", finished=result.finished[0], sampled=Sampled(**settings._asdict()))
    found = utterance_tensors(engine, case, columns, result, trace, 0)
    steps = result.lengths[0] + case.finished
    found["sampled.uniforms.semantic"] = floats(semantic[:steps, :, 0])
    found["sampled.uniforms.codes"] = floats(codes[:steps, :, 0])
    return case, found


def codec_tensors(engine: Recordable, codes: Array) -> dict[str, Array]:
    """Decoding of an utterance's codes, encoding of a chirp."""
    c = engine.config
    if not codes.shape[1]:
        codes = np.random.default_rng(SEED).integers(0, c.codebook_size, (c.num_codebooks, 8))
    decoded = engine.decode(torch.from_numpy(codes).long())
    found = {
        "codec.codes": codes.astype(np.int32),
        "codec.dequantised": floats(decoded.dequantised),
        "codec.latents": floats(decoded.latents),
        "codec.wave": floats(decoded.wave),
    }
    wave = chirp(c.codec_sample_rate)
    encoded = engine.encode(wave)
    if encoded is not None:
        found["codec.encode.wave"] = floats(wave)
        found["codec.encode.codes"] = integers(encoded[0])
        found["codec.encode.margins"] = floats(encoded[1])
    return found


def chirp(rate: int) -> Tensor:
    """A tone that rises from 100 to 4,000 Hz, in steps of 1 / 32768."""
    t = torch.arange(CHIRP_SAMPLES, dtype=torch.float64) / rate
    end = CHIRP_SAMPLES / rate
    phase = 2 * torch.pi * (100 * t + (4000 - 100) / (2 * end) * t**2)
    return (0.5 * torch.sin(phase) * 32768).round().float() / 32768


def floats(value: Tensor) -> Array:
    """A float32 array."""
    found: Array = value.detach().float().cpu().numpy()
    return found


def integers(value: Tensor) -> Array:
    """An int32 array."""
    found: Array = value.to(torch.int32).cpu().numpy()
    return found


def stacked(steps: list[Tensor], count: int, row: int) -> Array:
    """One row of the first `count` steps."""
    if not count:
        return np.zeros((0, *steps[0].shape[1:]), np.float32)
    return floats(torch.stack([step[row] for step in steps[:count]]))


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every weights file and of the config."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".pth") or path.name == "config.json":
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            found[path.name] = digest.hexdigest()
    return found
