"""The folder that keeps registered voices, one file each under the voice's name.

A name is never a path, so looking a voice up by name reads nothing outside the folder.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from warble_mlx.errors import VoiceError
from warble_mlx.registered import SUFFIX, RegisteredVoice, check_name, is_name, read_voice


def voice_folder() -> Path:
    """Where registered voices are kept: $WARBLE_VOICES, or the platform's folder for data."""
    chosen = os.environ.get("WARBLE_VOICES")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "warble-mlx" / "voices"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "warble-mlx" / "voices"


def voice_files() -> dict[str, Path]:
    """Names and files of the voice folder, in order; a file's name is the voice's."""
    found = {}
    try:
        for path in sorted(voice_folder().glob(f"*{SUFFIX}")):
            name = unicodedata.normalize("NFC", path.stem)
            if is_name(name):
                found[name] = path
    except OSError as error:
        raise VoiceError(f"{voice_folder()} cannot be read: {error.strerror or error}") from error
    return found


def registered_voices() -> Iterator[RegisteredVoice | VoiceError]:
    """Every voice of the folder, or the reason why its file is not usable."""
    for name in voice_files():
        try:
            yield registered(name)
        except VoiceError as error:
            yield error


def find_registered(name: str) -> RegisteredVoice | None:
    """The voice of this name (any case) in the voice folder, or None. VoiceError if its file is
    none of a voice."""
    wanted = unicodedata.normalize("NFC", name).strip().casefold()
    for known, path in voice_files().items():
        if known.casefold() == wanted:
            return replace(read_voice(path), name=known)
    return None


def registered(name: str) -> RegisteredVoice:
    """The voice of this name; VoiceError, with the names there are, if there is none."""
    found = find_registered(name)
    if found is None:
        known = ", ".join(voice_files()) or "none"
        raise VoiceError(
            f"no voice {name[:60]!r} is registered; there are: {known}. Make one with warble voice"
            " add"
        )
    return found


def file_of(name: str) -> Path:
    """Where the voice folder keeps, or would keep, a voice of this name (any case)."""
    name = check_name(name)
    for known, path in voice_files().items():
        if known.casefold() == name.casefold():
            return path
    return voice_folder() / f"{name}{SUFFIX}"


def keep(voice: RegisteredVoice, *, force: bool = False) -> Path:
    """Save a voice in the voice folder under its name; `force` replaces an older one."""
    path = file_of(voice.name)
    refuse_taken(voice.name, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VoiceError(f"{path.parent} cannot be made: {error.strerror or error}") from error
    return voice.save(path)


def refuse_taken(name: str, *, force: bool) -> None:
    """Raise VoiceError if there is a voice of this name already, unless `force`."""
    if not force and file_of(name).exists():
        raise VoiceError(f"there is a voice {name!r} already: choose another name, or --force")


def remove(name: str) -> Path:
    """Delete a voice of the voice folder, and return its file. VoiceError if there is none."""
    path = file_of(name)
    try:
        path.unlink()
    except FileNotFoundError:
        registered(name)  # says what there is
        raise
    except OSError as error:
        raise VoiceError(f"{path} cannot be removed: {error.strerror or error}") from error
    return path
