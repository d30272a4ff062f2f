"""Registered voices: a reference clip as codes, in one small file that needs no encoder.

A voice file is a safetensors file with one tensor, `codes` int32 [10, frames], and its facts as
metadata: name, transcript, description, language, the codec that the codes belong to, and how
long and at which rate the clip was. It holds neither the clip nor a path.

A voice's name is never a path; `voice_folder` finds files by name.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warble_mlx import __version__
from warble_mlx.config import NUM_CODEBOOKS, ModelConfig
from warble_mlx.errors import CheckpointError, TextError, VoiceError
from warble_mlx.prompt import Reference
from warble_mlx.safetensors_file import read_header, write_safetensors
from warble_mlx.staging import staged_file
from warble_mlx.text import clean, speakable
from warble_mlx.voices import VoiceList, is_number

SUFFIX = ".safetensors"
FORMAT = "warble-voice"
FORMAT_VERSION = "1"
MAX_SECONDS = 30.0
MAX_FRAMES = 4096  # of any codec; a model's own limit is MAX_SECONDS
MAX_FILE_BYTES = 1_000_000
MAX_TRANSCRIPT = 2_000  # characters
MAX_DESCRIPTION = 500
_NAME = re.compile(r"[^\W_](?:[\w -]{0,38}[\w-])?")
_LANGUAGE = re.compile(r"(?:[A-Za-z0-9]{1,8}(?:-[A-Za-z0-9]{1,8}){0,4})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Codec:
    """Which codec codes belong to: its shape in words, and the SHA-256 of the file it came from."""

    shape: str
    sha256: str

    @classmethod
    def of(cls, folder: Path, config: ModelConfig, raw: Mapping[str, Any]) -> Codec:
        """The codec of a bundle, whose config.json is `raw`.

        The file is the one that the bundle was converted from, so that bundles of other precision
        or quantisation share their voices; a bundle that does not know it names its own decoder.
        """
        shape = (
            f"{config.num_codebooks} codebooks of {config.codec_semantic_codebook_size} and"
            f" {config.codec_residual_codebook_size}, {config.codec_frame_size} samples a frame at"
            f" {config.codec_sample_rate} Hz"
        )
        provenance = raw.get("provenance")
        files = provenance.get("source_files") if isinstance(provenance, dict) else None
        for name, digest in (files if isinstance(files, dict) else {}).items():
            if str(name).startswith("codec") and _SHA256.fullmatch(str(digest)):
                return cls(shape, str(digest))
        return cls(shape, _sha256(folder / "codec_decoder.safetensors"))


@dataclass(frozen=True, eq=False)
class RegisteredVoice:
    """A voice made of a clip: pass it as `voice=`, or keep it with `save`."""

    name: str  # empty for one that has not been named
    transcript: str
    codes: npt.NDArray[np.int32]  # [10, frames]
    codec: Codec
    description: str = ""
    language: str = ""
    clip_seconds: float = 0.0
    clip_sample_rate: int = 0  # Hz
    made_by: str = f"warble-mlx {__version__}"
    warnings: tuple[str, ...] = ()  # about the clip; not kept in the file

    @property
    def reference(self) -> Reference:
        """What a prompt needs of the voice."""
        return Reference(self.transcript, self.codes)

    def check_codec(self, codec: Codec, frame_rate_hz: float) -> None:
        """Raise VoiceError unless the codes belong to `codec` and are at most 30 s of it."""
        if self.codec != codec:
            raise VoiceError(
                f"the voice {self.name!r} was made for another codec ({_short(self.codec)}); this"
                f" model has {_short(codec)}. Make it again from its clip: warble voice add"
            )
        if self.codes.shape[1] > math.ceil(MAX_SECONDS * frame_rate_hz):
            raise VoiceError(
                f"the voice {self.name!r} has {self.codes.shape[1]} frames,"
                f" {self.codes.shape[1] / frame_rate_hz:.1f} s, at most {MAX_SECONDS:.0f} s are"
                " possible"
            )

    def save(self, path: str | Path) -> Path:
        """Write the voice file; an existing one is replaced, whole or not at all."""
        path = Path(path)
        if path.suffix != SUFFIX:
            raise VoiceError(f"a voice file is named *{SUFFIX}, not {path.name}")
        check_name(self.name)
        codes = np.ascontiguousarray(self.codes, np.int32)
        shape = (codes.shape[0], codes.shape[1])
        metadata = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "transcript": self.transcript,
            "description": self.description,
            "language": self.language,
            "codec": self.codec.shape,
            "codec_sha256": self.codec.sha256,
            "clip_seconds": f"{self.clip_seconds:.3f}",
            "clip_sample_rate": str(self.clip_sample_rate),
            "made_by": self.made_by,
        }
        try:
            with staged_file(path) as part:
                write_safetensors(part, {"codes": ("I32", shape)}, lambda _: codes, metadata)
                read_voice(part)  # what could not be read back is not worth keeping
        except CheckpointError as error:
            raise VoiceError(str(error).replace(str(part), str(path))) from error
        except OSError as error:
            raise VoiceError(f"{path} cannot be written: {error.strerror or error}") from error
        return path


def read_voice(path: str | Path) -> RegisteredVoice:
    """Read a voice file; VoiceError, naming the file, for anything that is not one."""
    path = Path(path)
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise VoiceError(f"the voice file {path} {what}")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise VoiceError(
                f"{path} is no voice file: it has {size} bytes, at most {MAX_FILE_BYTES} are"
                " possible"
            )
        header = read_header(path)
        found = _from_metadata(path, header.metadata)
        entry = header.entries.get("codes")
        if entry is None or len(header.entries) != 1 or entry.dtype != "I32":
            raise VoiceError(f"{path} is no voice file: it must hold one int32 tensor, codes")
        if len(entry.shape) != 2 or entry.shape[0] != NUM_CODEBOOKS:
            raise VoiceError(
                f"{path}: codes have the shape {list(entry.shape)}, not [{NUM_CODEBOOKS}, frames]"
            )
        if not 1 <= entry.shape[1] <= MAX_FRAMES:
            raise VoiceError(f"{path}: {entry.shape[1]} frames are not 1 to {MAX_FRAMES}")
        codes = header.read("codes").astype(np.int32, copy=False)
    except CheckpointError as error:
        raise VoiceError(f"{error} (voice-file)") from error
    except OSError as error:
        raise VoiceError(f"{path} cannot be read: {error.strerror or error}") from error
    least = int(np.min(codes))
    if least < 0:
        raise VoiceError(f"{path}: codes reach down to {least}, they must be 0 or more")
    return RegisteredVoice(codes=codes, **found)


def _from_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Checked fields of a RegisteredVoice, all but its codes."""
    if metadata.get("format") != FORMAT:
        raise VoiceError(f"{path} is no voice file: make one with warble voice add")
    version = metadata.get("format_version", "")
    if version != FORMAT_VERSION:
        raise VoiceError(
            f"{path} is a voice file of format {version[:20]!r}, this version reads"
            f" {FORMAT_VERSION}: update warble-mlx"
        )
    # The texts are shown on terminals: nothing invisible may be among them.
    for key in ("name", "transcript", "description", "language", "codec", "made_by"):
        text = metadata.get(key)
        if text is None or len(text) > MAX_TRANSCRIPT or text != clean(text):
            raise VoiceError(f"{path}: its {key} is missing, too long or not plain text")
    try:
        name = check_name(metadata["name"])
        transcript = speakable(metadata["transcript"], "transcript")
        description = check_description(metadata["description"])
        language = check_language(metadata["language"])
        seconds = float(metadata["clip_seconds"])
        rate = int(metadata["clip_sample_rate"])
    except (VoiceError, TextError, KeyError, ValueError) as error:
        raise VoiceError(f"{path} is a damaged voice file: {error}") from error
    digest = metadata.get("codec_sha256", "")
    if not (math.isfinite(seconds) and seconds >= 0 and rate >= 0 and _SHA256.fullmatch(digest)):
        raise VoiceError(f"{path} is a damaged voice file: its clip or codec facts make no sense")
    return {
        "name": name,
        "transcript": transcript,
        "codec": Codec(metadata["codec"], digest),
        "description": description,
        "language": language,
        "clip_seconds": seconds,
        "clip_sample_rate": rate,
        "made_by": metadata["made_by"],
    }


# ---------------------------------------------------------------------------- names and texts


def check_name(name: str) -> str:
    """The name, composed (NFC), or VoiceError if no voice may be called so."""
    composed = re.sub(" +", " ", unicodedata.normalize("NFC", name)).strip()
    if not _NAME.fullmatch(composed):
        raise VoiceError(
            f"{name[:60]!r} cannot name a voice: 1 to 40 letters, digits, - and _, spaces inside,"
            " the first one a letter or digit"
        )
    if is_number(composed):
        raise VoiceError(f"{name!r} cannot name a voice: numbers choose a model's own voices")
    return composed


def is_name(name: str) -> bool:
    """Whether a voice may be called so."""
    return _NAME.fullmatch(name) is not None and not is_number(name)


def check_free(name: str, own: VoiceList) -> str:
    """`check_name`, and VoiceError for a name that one of the model's own voices has."""
    name = check_name(name)
    for voice in own.voices:
        if voice.name.casefold() == name.casefold():
            raise VoiceError(f"{name!r} is a voice of the model itself: choose another name")
    return name


def check_description(text: str) -> str:
    """The description on one line, or VoiceError if it is too long."""
    text = clean(text)
    if len(text) > MAX_DESCRIPTION:
        raise VoiceError(
            f"the description has {len(text)} characters, at most {MAX_DESCRIPTION} are possible"
        )
    return text


def check_language(code: str) -> str:
    """A language code such as en or pt-BR, or empty."""
    if not _LANGUAGE.fullmatch(code):
        raise VoiceError(f"{code[:40]!r} is no language code: give one such as en or pt-BR")
    return code


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            state = hashlib.sha256()
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return state.hexdigest()


def _short(codec: Codec) -> str:
    return f"{codec.shape}, {codec.sha256[:8]}"
