"""What the manifest says about the model itself: ids, defaults, voices, bandwidth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from warble_mlx import __version__
from warble_mlx.config import ModelConfig
from warble_mlx.errors import VoiceError
from warble_mlx.ios_export import manifest as m
from warble_mlx.ios_export.job import MLX_VERSION, Job
from warble_mlx.ios_export.mlx_functions import CHUNK_FRAMES
from warble_mlx.prompt import ASSISTANT, CLONE, END, PLAIN, SPEECH, SYSTEM, USER
from warble_mlx.quant.policy import DEFAULT_POLICY, POLICIES
from warble_mlx.registered import Codec, RegisteredVoice
from warble_mlx.safetensors_file import read_header, write_safetensors
from warble_mlx.sampling import MIN_TEMPERATURE
from warble_mlx.voices import read_voices
from warble_mlx.weights import DECODER_FILE, MODEL_FILE

ORDER = (
    "softmax of the untempered scores, in descending order, cumulated",
    "keep rank 0, and ranks below top_k whose sum including themselves is at most top_p",
    "divide by the temperature",
    "largest of score - log(-log(uniform))",
    "semantic token: a second draw with the rescue settings replaces one in the window",
)
KEPT = ("embeddings", "codebook_embeddings", "fast_embeddings", "fast_output", "norms")
ASSUMED_BANDWIDTH = 60e9  # bytes per second
PHONE = "iPhone with A18 Pro, 8 GB"
VOICES_FOLDER = "voices"


def model(job: Job) -> m.Model:
    """Where the weights come from."""
    provenance = job.raw_config.get("provenance")
    known: dict[str, Any] = provenance if isinstance(provenance, dict) else {}
    return m.Model(
        name=job.bundle.resolve().name,
        source=str(known.get("source", "unknown")),
        revision=known.get("revision"),
        licence="see LICENSE and NOTICE of the source model",
    )


def created_by(job: Job, coremltools: str = "", torch: str = "") -> m.CreatedBy:
    """Versions."""
    return m.CreatedBy(
        warble_mlx=__version__, mlx=MLX_VERSION, coremltools=coremltools, torch=torch
    )


def audio(job: Job) -> m.Audio:
    """Rates of the codec."""
    c = job.config
    return m.Audio(
        sample_rate=c.codec_sample_rate,
        samples_per_frame=c.codec_frame_size,
        frame_rate_hz=c.frame_rate_hz,
    )


def dimensions(job: Job) -> dict[str, int | float]:
    """Numbers of config.json, by its names."""
    return {
        name: value
        for name in job.config.__struct_fields__
        if type(value := getattr(job.config, name)) in (int, float)
    }


def tokens(job: Job) -> m.Tokens:
    """Special ids and the prompt's fixed pieces, tokenised."""
    c = job.config
    tokenizer = Tokenizer.from_file(str(job.bundle / "tokenizer.json"))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return m.Tokens(
        semantic_begin=c.semantic_begin_id,
        semantic_end=c.semantic_end_id,
        eos=c.eos_token_id,
        pad=c.pad_token_id,
        codebooks=c.num_codebooks,
        codebook_size=c.codebook_size,
        system=ids(SYSTEM),
        plain=ids(PLAIN),
        clone=ids(CLONE),
        speech=ids(SPEECH),
        end=ids(END),
        user=ids(USER),
        assistant=ids(ASSISTANT),
        byte_ids=_byte_ids(tokenizer),
    )


def _byte_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id of each byte of UTF-8, if that is all that the tokenizer does: then an app can do it
    by itself. Bytes that UTF-8 never uses are -1; empty for a tokenizer that merges."""
    found = [-1] * 256
    every_byte = [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]
    for character in map(chr, every_byte):
        read, raw = tokenizer.encode(character, add_special_tokens=False).ids, character.encode()
        if len(read) != len(raw):
            return ()
        for byte, token in zip(raw, read, strict=True):
            found[byte] = token
    words = "The harbour was quiet, and café naïve."
    read = tokenizer.encode(words, add_special_tokens=False).ids
    return tuple(found) if read == [found[b] for b in words.encode()] else ()


def sampling(job: Job) -> m.Sampling:
    """Order of the choice and the model's defaults."""
    c, generation = job.config, job.raw_config.get("generation", {})
    return m.Sampling(
        order=ORDER,
        top_k=generation.get("top_k", 50),
        top_p=generation.get("top_p", 0.9),
        temperature=generation.get("temperature", 0.7),
        min_temperature=MIN_TEMPERATURE,
        rescue_window=c.ras_window_size,
        rescue_top_p=c.ras_top_p,
        rescue_temperature=c.ras_temperature,
        max_frames=generation.get("max_new_tokens", 512),
        max_text_characters=generation.get("max_text_chars"),
    )


def quantization(job: Job) -> m.Quantization | None:
    """The packing of the blocks' Linears; None for a 16-bit bundle."""
    block = job.raw_config.get("quantization")
    if not isinstance(block, dict):
        return None
    packed = packed_paths(job.bundle)
    return m.Quantization(
        bits=block["bits"],
        group_size=block["group_size"],
        mode=block.get("mode", "affine"),
        linears=len(packed),
        kept=KEPT,
    )


def packed_paths(bundle: Path) -> list[str]:
    """Paths of the Linears that a bundle stores packed."""
    names = read_header(bundle / MODEL_FILE).entries
    return sorted(n.removesuffix(".scales") for n in names if n.endswith(".scales"))


def is_published(config: ModelConfig) -> bool:
    """Whether the transformers have the published model's size."""
    return (config.n_layer, config.dim, config.vocab_size) == (24, 896, 155_776)


def block_linears(bundle: Path) -> list[str]:
    """Paths of the Linears that the policy packs, packed or not."""
    packs = POLICIES[DEFAULT_POLICY]
    names = (n.removesuffix(".weight") for n in read_header(bundle / MODEL_FILE).entries)
    return sorted(n for n in names if packs(n))


def voices(job: Job, names: Sequence[str], folder: Path) -> tuple[m.VoiceEntry, ...]:
    """Entries of the wanted voices, all of the bundle's if none are named; registered ones are
    written to `folder`/voices as prompt columns, so that an app needs neither their clip nor the
    encoder. Raises VoiceError for an unknown name."""
    from warble_mlx.voice_folder import registered

    listed = read_voices(job.bundle)
    tokenizer = Tokenizer.from_file(str(job.bundle / "tokenizer.json"))
    own = {voice.name.casefold(): voice for voice in listed.voices}
    chosen: list[m.VoiceEntry] = []
    for name in names or [voice.name for voice in listed.voices]:
        voice = own.get(name.casefold())
        if voice is None:
            chosen.append(_registered(job, registered(name), folder))
            continue
        token_ids = tokenizer.encode(voice.token, add_special_tokens=False).ids
        chosen.append(
            m.VoiceEntry(
                name=voice.name,
                default=voice == listed.default_voice,
                description=voice.description,
                language=voice.language,
                token_ids=tuple(token_ids),
            )
        )
    if len({v.name.casefold() for v in chosen}) != len(chosen):
        raise VoiceError("a voice is named twice: give each name once")
    return tuple(chosen)


def _registered(job: Job, voice: RegisteredVoice, folder: Path) -> m.VoiceEntry:
    codec = Codec.of(job.bundle, job.config, job.raw_config)
    voice.check_codec(codec, job.config.frame_rate_hz)
    columns = job.prompts.build("voice", reference=voice.reference).prefix.astype(np.int32)
    (folder / VOICES_FOLDER).mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", voice.name.casefold()).strip("-") + ".safetensors"
    write_safetensors(
        folder / VOICES_FOLDER / name,
        {"columns": ("I32", (columns.shape[0], columns.shape[1]))},
        lambda _: columns,
        {"name": voice.name, "transcript": voice.transcript},
    )
    return m.VoiceEntry(
        name=voice.name,
        default=False,
        description=voice.description,
        language=voice.language,
        file=f"{VOICES_FOLDER}/{name}",
    )


def bandwidth(job: Job) -> m.Bandwidth:
    """Bytes of weights that one frame has to read, from the stored tensors' sizes.

    The slow blocks once, the fast blocks nine times (its first two positions are one pass), the
    sliced head once, the fast head nine times, the codec once per chunk of seven frames.
    """
    entries = read_header(job.bundle / MODEL_FILE).entries
    passes = job.config.num_codebooks - 1

    def nbytes(prefix: str) -> int:
        return sum(e.nbytes for name, e in entries.items() if name.startswith(prefix))

    head = job.config.head_rows * job.config.dim * 2
    decoder = read_header(job.bundle / DECODER_FILE).entries
    codec = sum(e.nbytes for e in decoder.values())
    # Widened to float32 where it is used: read, written twice as wide, read again.
    per_frame = nbytes("layers.") + head + passes * (nbytes("fast_layers.") + nbytes("fast_output"))
    per_frame += 5 * codec // CHUNK_FRAMES
    rate = per_frame * job.config.frame_rate_hz
    return m.Bandwidth(
        device=PHONE,
        assumed_bytes_per_s=ASSUMED_BANDWIDTH,
        bytes_per_frame=per_frame,
        bytes_per_s_of_speech=rate,
        real_time_factor_floor=round(rate / ASSUMED_BANDWIDTH, 4),
        note="projection: no phone was used; weights only, codec through codec.mlxfn, no caches",
    )
