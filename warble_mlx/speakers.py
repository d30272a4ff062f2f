"""Who speaks: one of the model's voices, a registered one, or a clip that is followed."""

from __future__ import annotations

import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.clips import prepare_clip
from warble_mlx.codec import CodecEncoder
from warble_mlx.codec.quantizer import DequantizingHalf
from warble_mlx.config import ModelConfig
from warble_mlx.errors import CheckpointError, VoiceError, VoiceWarning
from warble_mlx.options import Options
from warble_mlx.prompt import Reference
from warble_mlx.registered import SUFFIX, Codec, RegisteredVoice, read_voice
from warble_mlx.voice_folder import find_registered, voice_files
from warble_mlx.voices import Voice, VoiceList, is_number, read_voices
from warble_mlx.weights import ENCODER_FILE, load_strictly

Samples = npt.NDArray[np.float32]


class Speaker(NamedTuple):
    """A voice as a prompt needs it: a token of the model, a reference to follow, or neither."""

    token: str = ""
    reference: Reference | None = None
    name: str | None = None
    language: str = ""  # code such as "en", if it is known


class Speakers:
    """Finds the speakers of one model, and reads clips into its codes."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        raw_config: dict[str, Any],
        quantizer: DequantizingHalf,
    ) -> None:
        self.own: VoiceList = read_voices(folder)
        self._folder, self._config, self._raw_config = folder, config, raw_config
        self._quantizer = quantizer

    def choose(self, options: Options) -> Speaker:
        """Who was asked for by voice or by ref_audio and ref_text; else the model's default.

        Raises VoiceError, AudioError, TextError, and CheckpointError for a clip in a model
        without an encoder.
        """
        voice = options.get("voice")
        clip, transcript = options.get("ref_audio"), options.get("ref_text")
        if clip is not None or transcript is not None:
            if voice is not None:
                raise VoiceError("give either a voice or a reference clip, not both")
            return Speaker(reference=self._follow(clip, transcript))
        found: Voice | RegisteredVoice | None
        if voice is None:
            found = self.own.default_voice
        elif isinstance(voice, Path):
            found = read_voice(voice)
        else:
            found = voice if isinstance(voice, RegisteredVoice) else self._named(voice)
        if found is None:
            return Speaker()
        if isinstance(found, Voice):
            return Speaker(found.token, None, found.name, found.language)
        found.check_codec(self.codec, self._config.frame_rate_hz)
        return Speaker("", found.reference, found.name or None, found.language)

    @cached_property
    def codec(self) -> Codec:
        """The codec that this model's codes belong to."""
        return Codec.of(self._folder, self._config, self._raw_config)

    def _named(self, wanted: str | int) -> Voice | RegisteredVoice:
        """A voice of the model, else one of the voice folder; VoiceError that lists both."""
        try:
            return self.own.find(wanted)
        except VoiceError as error:
            name = str(wanted)
            if is_number(name):
                raise
            if name.endswith(SUFFIX):
                raise VoiceError(f"no voice {name!r}: a voice file is given as a Path") from None
            found = find_registered(name)
            if found is None:
                known = ", ".join(voice_files())
                raise VoiceError(f"{error}; registered: {known or 'none'}") from None
            return found

    def _follow(self, clip: str | Path | None, transcript: str | None) -> Reference:
        if clip is None or transcript is None:
            part, name = ("clip", "audio") if clip is None else ("transcript", "text")
            raise VoiceError(
                f"a reference needs its {part}: give clip and transcript together"
                f" (reference-{name}-required)"
            )
        samples, spoken, info = prepare_clip(clip, transcript)
        for doubt in info.warnings:
            warnings.warn(doubt, VoiceWarning, stacklevel=_outside())
        return Reference(spoken, self.encode(samples))

    @cached_property
    def _encoder(self) -> CodecEncoder:
        path = self._folder / ENCODER_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{self._folder} has no {ENCODER_FILE}, which reading a reference clip needs:"
                " convert the model again with its encoder"
            )
        encoder = CodecEncoder(self._config)
        load_strictly(encoder, path, mx.float32, {})
        return encoder

    def encode(self, samples: Samples) -> npt.NDArray[np.int32]:
        """Codes int32 [10, frames] of mono samples [n] at 44.1 kHz."""
        codes, lengths = self._encoder.encode(mx.array(samples)[None], self._quantizer)
        return np.array(codes[0, :, : lengths[0]]).astype(np.int32)


def _outside() -> int:
    """The stack level, as `_follow` sees it, of whoever called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level
