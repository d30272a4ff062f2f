"""Playing speech on this machine's loudspeaker, through PortAudio."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from warble_mlx.errors import AudioError, MissingExtraError

if TYPE_CHECKING:
    import numpy.typing as npt


def can_play() -> bool:
    """Whether the extra `play` is installed and there is an output device."""
    try:
        sounddevice = _sounddevice()
        return bool(sounddevice.query_devices(kind="output"))
    except (MissingExtraError, AudioError, ValueError, OSError):
        return False
    except Exception as error:
        if _is_portaudio(error):
            return False
        raise


def play(samples: npt.ArrayLike, sample_rate: int) -> None:
    """Play mono float samples [n] at `sample_rate` Hz and wait until they have been heard.

    Raises MissingExtraError without sounddevice, and AudioError without a device or for samples
    that are no audio (see `warble_mlx.audio.checked`). Interrupted, it falls silent at once.
    """
    from warble_mlx.audio import checked, limit_peak

    sounddevice = _sounddevice()
    wave = limit_peak(checked(samples))
    try:
        sounddevice.play(wave, sample_rate)
        sounddevice.wait()
    except KeyboardInterrupt:
        sounddevice.stop()
        raise
    except Exception as error:
        if not _is_portaudio(error):
            raise
        raise AudioError(
            f"the loudspeaker cannot be used ({error}): write a file instead, with -o speech.wav"
        ) from error


def _sounddevice() -> Any:
    try:
        return importlib.import_module("sounddevice")
    except ModuleNotFoundError as error:
        raise MissingExtraError("Playing", "sounddevice", "play") from error
    except OSError as error:  # the package is there, the library it stands on is not
        raise AudioError(
            f"playing needs PortAudio ({error}): sudo apt install libportaudio2"
        ) from error


def _is_portaudio(error: Exception) -> bool:
    return type(error).__name__ == "PortAudioError"
