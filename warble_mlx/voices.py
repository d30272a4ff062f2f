"""The named voices of a bundle: voices.json, and how a user may name one."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from warble_mlx.errors import CheckpointError, VoiceError

_NUMBER = re.compile(r"(?:speaker\s*)?(\d+)", re.IGNORECASE)


class Voice(msgspec.Struct, frozen=True):
    """A voice that the model knows. `token` stands in front of the text and selects it."""

    id: int
    name: str
    token: str
    language: str = ""
    description: str = ""


class VoiceList(msgspec.Struct, frozen=True):
    """voices.json: the voices and the id of the one that speaks unless another is asked for."""

    voices: tuple[Voice, ...] = ()
    default: int | None = None

    @property
    def default_voice(self) -> Voice | None:
        return next((v for v in self.voices if v.id == self.default), None)

    def find(self, wanted: str | int) -> Voice:
        """The voice with this name (any case), number, or `speaker N`.

        A model that lists no voices takes any number: the published family selects speakers by
        the text `<|speaker:N|>`. Raises VoiceError that lists what there is.
        """
        name = str(wanted).strip()
        for voice in self.voices:
            if voice.name.casefold() == name.casefold():
                return voice
        number = _NUMBER.fullmatch(name)
        if number:
            for voice in self.voices:
                if voice.id == int(number[1]):
                    return voice
            if not self.voices:
                return Voice(int(number[1]), f"speaker {number[1]}", f"<|speaker:{number[1]}|>")
        if not self.voices:
            raise VoiceError(
                f"no voice {name[:60]!r}: this model lists no voices; give a number for"
                " `<|speaker:N|>`, or a reference clip with its transcript"
            )
        known = ", ".join(f"{v.name} ({v.id})" for v in self.voices)
        raise VoiceError(f"no voice {name[:60]!r}; this model has: {known}")


def is_number(name: str) -> bool:
    """Whether a name is a number or `speaker N`, which choose a model's own voices."""
    return _NUMBER.fullmatch(name.strip()) is not None


def read_voices(folder: Path) -> VoiceList:
    """Read `folder`/voices.json; a model without the file has no named voices."""
    path = folder / "voices.json"
    if not path.is_file():
        return VoiceList()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=VoiceList)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if found.default is not None and found.default_voice is None:
        raise CheckpointError(f"{path}: the default voice {found.default} is not in its list")
    return found
