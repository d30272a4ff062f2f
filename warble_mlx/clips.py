"""Reading a reference clip: any file becomes mono at 44.1 kHz, or a sentence says why not.

What is repaired, each with a warning: a quiet clip is made louder, a constant offset is taken
away, a peak beyond full scale is scaled down, and of channels that would cancel each other only
the loudest is used. A clip without such a fault is passed on sample by sample.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr

from warble_mlx.audio import SPOILT_PEAK
from warble_mlx.clip_files import MAX_CLIP_SECONDS, Samples, Span, read_file
from warble_mlx.errors import VoiceError
from warble_mlx.text import speakable

CLIP_RATE = 44_100  # Hz, what the codec hears
MIN_CLIP_SECONDS = 0.3
SILENCE_PEAK = 10 ** (-70 / 20)  # 8-bit and 16-bit noise lies below, whispers lie above
QUIET_PEAK = 10 ** (-35 / 20)  # below it a clip is made louder
RAISED_PEAK = 10 ** (-3 / 20)  # what a quiet clip then peaks at, as recordings usually do
FULL_SCALE = 0.999
FULL_SCALE_8_BIT = 1 - 2**-7
OFFSET = 0.02  # a constant part above this is no recording's own
CANCELLING = 0.25  # power of the sum of channels over the sum of their powers; 1 if unrelated
LOW_BANDWIDTH_RATE = 16_000  # Hz; below it, telephone sound

_BLOCK_SECONDS = 0.02
_SPEECH_BELOW_LOUDEST = 30.0  # dB: quieter blocks are pauses
# Hiss: levels that hardly move, and a spectrum without form. Flatness (geometric over arithmetic
# mean of the power spectrum) is 0.56 for white noise and below 0.1 for speech.
_HISS_RANGE = 6.0  # dB between the quiet and the loud blocks
_HISS_FLATNESS = 0.3

# Characters per second of speech, pauses left out. Readers do 12 to 20, the bundled voices 9 to 24.
SLOWEST_POSSIBLE, SLOWEST_LIKELY = 3.0, 8.0
FASTEST_LIKELY, FASTEST_POSSIBLE = 30.0, 45.0
# One sign stands for several letters: a digit for a word at most, an ideograph, kana or hangul
# for a syllable or two.
_DIGIT_LETTERS = 5
_SYLLABLE_LETTERS = (2, 4)
_SYLLABLE = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class ClipInfo:
    """What a clip was before it became mono at 44.1 kHz, and what may spoil a voice made of it."""

    path: Path
    seconds: float  # of the part that is used
    sample_rate: int  # Hz, of the file
    channels: int
    format: str  # such as "WAV PCM_16"
    peak: float  # of the mono signal as recorded, 1 = full scale
    speech_seconds: float  # pauses left out
    warnings: tuple[str, ...] = ()


def prepare_clip(
    path: str | Path, transcript: str, span: Span | None = None
) -> tuple[Samples, str, ClipInfo]:
    """A clip and what is said in it, checked alone and against each other.

    Returns the samples, the cleaned transcript, and the facts with all warnings. Raises what
    `read_clip` and `check_transcript` raise.
    """
    spoken = _required(transcript)
    samples, info = read_clip(path, span)
    doubts = check_transcript(spoken, info)
    return samples, spoken, replace(info, warnings=(*info.warnings, *doubts))


def read_clip(path: str | Path, span: Span | None = None) -> tuple[Samples, ClipInfo]:
    """Read a reference clip of any rate, channels and depth: float32 mono [n] at 44,100 Hz.

    span: seconds (begin, end) of the file to use. Raises AudioError for what is no audio
    (reference-unreadable) and VoiceError for what makes no voice (reference-silent, -too-short,
    -too-long, -not-finite).
    """
    path = Path(path)
    found = read_file(path, span)
    wave, rate = found.wave, found.sample_rate
    seconds = len(wave) / rate
    if seconds > MAX_CLIP_SECONDS:
        _refuse_long(path, found.seconds)
    _refuse_unusable(path, wave, seconds)
    doubts = _doubts(path, wave, rate, found.format)
    mono = _mono(path, wave, doubts)
    peak = float(np.abs(mono).max())
    mono = _levelled(path, mono, doubts)
    speech = speech_seconds(mono, rate)
    if speech < MIN_CLIP_SECONDS:
        raise VoiceError(
            f"the clip {path} lasts {seconds:.2f} s, but only {speech:.2f} s of it are sound, a"
            f" voice needs at least {MIN_CLIP_SECONDS} s (reference-too-short)"
        )
    info = ClipInfo(path, seconds, rate, wave.shape[1], found.format, peak, speech, tuple(doubts))
    if rate != CLIP_RATE:
        mono = soxr.resample(mono, rate, CLIP_RATE, quality="VHQ").astype(np.float32)
    return mono, info


def check_transcript(transcript: str, info: ClipInfo) -> list[str]:
    """Compare a transcript's length with the clip's: sentences about what is unlikely.

    Raises VoiceError for what is impossible, since the model would then speak garbage.
    """
    spoken = _required(transcript)
    low, high = _letters(spoken)
    seconds = info.speech_seconds
    if high / seconds >= SLOWEST_LIKELY and low / seconds <= FASTEST_LIKELY:
        return []
    measured = (
        f"the transcript has {len(spoken)} characters, but {info.path} holds {seconds:.1f} s of"
        f" speech, which is {len(spoken) / seconds:.1f} a second; people say 8 to 30"
    )
    if high / seconds < SLOWEST_LIKELY:
        sentence = (
            f"{measured}. Write down every word of the clip, or cut the clip to these words"
            " (transcript-too-short-for-clip)"
        )
        impossible = high / seconds < SLOWEST_POSSIBLE
    else:
        sentence = (
            f"{measured}. Leave out what is not said in the clip (transcript-too-long-for-clip)"
        )
        impossible = low / seconds > FASTEST_POSSIBLE
    if impossible:
        raise VoiceError(sentence)
    return [sentence]


def speech_seconds(mono: Samples, rate: int) -> float:
    """Seconds of samples [n] that are not pauses: blocks within 30 dB of the loudest ones."""
    levels = _levels(mono, rate)
    # Not the very loudest, which may be a click.
    loud = levels > np.percentile(levels, 99) - _SPEECH_BELOW_LOUDEST
    return float(loud.mean()) * len(mono) / rate


def _required(transcript: str) -> str:
    if isinstance(transcript, str) and not transcript.strip():
        raise VoiceError(
            "a reference clip needs its transcript: write down, word for word, what is said in"
            " it (reference-text-required)"
        )
    return speakable(transcript, "transcript")


def _letters(text: str) -> tuple[float, float]:
    """Fewest and most letters that `text` may stand for when it is read out."""
    syllables = len(_SYLLABLE.findall(text))
    digits = sum(c.isdecimal() for c in text)
    rest = len(text) - syllables
    fewest, most = _SYLLABLE_LETTERS
    return rest + fewest * syllables, rest + (_DIGIT_LETTERS - 1) * digits + most * syllables


def _levels(mono: Samples, rate: int) -> npt.NDArray[np.float64]:
    """Level of each 20 ms block of samples [n], in dB; the last, shorter one is left out."""
    length = min(max(round(_BLOCK_SECONDS * rate), 1), len(mono))
    blocks = mono[: len(mono) // length * length].reshape(-1, length).astype(np.float64)
    return np.asarray(10 * np.log10((blocks**2).mean(axis=1) + 1e-12))


def _refuse_long(path: Path, seconds: float) -> None:
    raise VoiceError(
        f"the clip {path} lasts {seconds:.1f} s, at most {MAX_CLIP_SECONDS:.0f} s are possible and"
        " 3 to 15 s are best: choose a part with --clip-seconds 0:12 and give the words of that"
        f" part, or cut it with ffmpeg -t 12 -i {shlex.quote(str(path))} short.wav"
        " (reference-too-long)"
    )


def _refuse_unusable(path: Path, wave: Samples, seconds: float) -> None:
    """VoiceError unless samples [n, channels] are finite, long enough and of sane level."""
    if not np.isfinite(wave).all():
        raise VoiceError(
            f"the clip {path} holds samples that are not numbers: export it again, as 16-bit WAV"
            " (reference-not-finite)"
        )
    if seconds < MIN_CLIP_SECONDS:
        raise VoiceError(
            f"the clip {path} lasts {seconds:.2f} s, a voice needs at least {MIN_CLIP_SECONDS} s"
            " and 3 to 15 s are best (reference-too-short)"
        )
    peak = float(np.abs(wave).max())
    if peak > SPOILT_PEAK:
        raise VoiceError(
            f"the clip {path} peaks at {peak:.3g} times full scale: export it again, as 16-bit WAV"
            " (reference-not-finite)"
        )


def _doubts(path: Path, wave: Samples, rate: int, kind: str) -> list[str]:
    """Sentences on what will be heard in a voice made of samples [n, channels]."""
    doubts = []
    if rate < LOW_BANDWIDTH_RATE:
        doubts.append(
            f"the clip {path} has {rate} Hz, so its voice will sound like a telephone's; 24 kHz or"
            " more are better (low-bandwidth)"
        )
    # Two neighbours at full scale are a flattened peak; one may be a normalised recording's.
    loud = np.abs(wave) >= (FULL_SCALE_8_BIT if kind.endswith("8") else FULL_SCALE)
    flat = int(np.count_nonzero((loud[1:] & loud[:-1]).any(axis=1)))
    if flat:
        doubts.append(
            f"the clip {path} is clipped ({flat / len(wave):.1%} of it): record it at a lower level"
            " (reference-clipped)"
        )
    return doubts


def _mono(path: Path, wave: Samples, doubts: list[str]) -> Samples:
    """The mean of channels [n, channels], or the loudest one where the mean would cancel them."""
    mean: Samples = wave.mean(axis=1, dtype=np.float64).astype(np.float32)
    channels = wave.shape[1]
    powers = wave.var(axis=0, dtype=np.float64)
    if channels == 1 or float(np.max(powers)) < SILENCE_PEAK**2 / 100:
        return mean
    kept = channels**2 * float(mean.var(dtype=np.float64)) / float(powers.sum())
    if kept >= CANCELLING:
        return mean
    loudest = int(np.argmax(powers))
    doubts.append(
        f"the channels of {path} cancel each other (one is wired the wrong way round), so only"
        f" channel {loudest + 1} of {channels} is used (reference-anti-phase)"
    )
    return np.ascontiguousarray(wave[:, loudest])


def _levelled(path: Path, mono: Samples, doubts: list[str]) -> Samples:
    """`mono` [n] at a level the codec knows; VoiceError if there is nothing but silence in it."""
    offset = float(mono.mean(dtype=np.float64))
    centred = mono - np.float32(offset)
    peak = float(np.abs(centred).max())
    if peak < SILENCE_PEAK:
        raise VoiceError(
            f"the clip {path} is silent (its peak is {_decibel(peak)}): record it again"
            " (reference-silent)"
        )
    if abs(offset) > OFFSET:
        doubts.append(
            f"the clip {path} has a constant offset of {offset:+.2f}, which was taken away"
            " (reference-offset)"
        )
        mono = centred
    if peak < QUIET_PEAK:
        if _is_hiss(centred):
            raise VoiceError(
                f"the clip {path} holds nothing but faint noise (its peak is {_decibel(peak)}):"
                " record it again (reference-silent)"
            )
        gain = RAISED_PEAK / peak
        doubts.append(
            f"the clip {path} is quiet (its peak is {_decibel(peak)}), so it was made"
            f" {20 * math.log10(gain):.0f} dB louder, its noise as well (reference-quiet)"
        )
        return np.asarray(centred * np.float32(gain))
    highest = float(np.abs(mono).max())
    # Files of floating-point samples, and lossy ones, may go beyond full scale.
    return mono if highest <= 1 else np.asarray(mono / np.float32(highest))


def _is_hiss(mono: Samples) -> bool:
    levels = _levels(mono, CLIP_RATE)
    low, high = np.percentile(levels, [5, 95])
    if high - low > _HISS_RANGE:
        return False
    power = np.abs(np.fft.rfft(mono * np.hanning(len(mono)))) ** 2 + 1e-20
    return float(np.exp(np.log(power).mean()) / power.mean()) > _HISS_FLATNESS


def _decibel(peak: float) -> str:
    return f"{20 * math.log10(peak):.0f} dBFS" if peak else "exactly zero"
