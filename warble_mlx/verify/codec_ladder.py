"""The rungs of the codec: its RoPE table, the stages of decoding, the waveform, encoding."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from warble_mlx.codec.carry import Carry
from warble_mlx.codec.transformer import rope_rows
from warble_mlx.config import CODEC_HEAD_DIM, CODEC_ROPE_BASE
from warble_mlx.verify.compare import Array, CodecLimits, Outcome, values
from warble_mlx.verify.dump import Dump
from warble_mlx.verify.ladder import Rung
from warble_mlx.verify.subject import Subject

STREAMED_CHUNKS = (1, 3, 7)  # frames; repeated until the codes are used up
STREAMED_LIMIT = 1e-5


class CodecRungs:
    """Holds one subject's codec against a dump's."""

    def __init__(self, subject: Subject, dump: Dump, limits: CodecLimits) -> None:
        self._subject, self._dump, self._limits = subject, dump, limits

    def rungs(self) -> Iterator[Rung]:
        """In the order in which they are climbed; none if either side has no codec."""
        if self._subject.decoder is None or not self._dump.has_codec:
            return
        yield Rung("codec rope", self.rope)
        yield Rung("codec dequantised", self.dequantised)
        yield Rung("codec latents", self.latents)
        yield Rung("waveform", self.waveform)
        yield Rung("waveform streamed", self.streamed)
        if self._subject.encoder is not None and "codec.encode.codes" in self._dump.tensors:
            yield Rung("codec codes", self.encoded)

    def rope(self) -> list[Outcome]:
        """The table of the window transformers, bit for bit."""
        wanted = self._dump["rope.codec"]
        got = rope_rows(mx.arange(len(wanted)), CODEC_HEAD_DIM, CODEC_ROPE_BASE)
        axes = "position, pair, (cos, sin)"
        return [values("codec rope", np.array(got), wanted, 0, relative=False, axes=axes)]

    def dequantised(self) -> list[Outcome]:
        """Codes to the sum of their vectors."""
        decoder = self._subject.decoder
        assert decoder is not None
        got = decoder.quantizer.dequantize(self._codes())
        return [self._stage("codec dequantised", got)]

    def latents(self) -> list[Outcome]:
        """Codes through post_module and upsampling."""
        decoder = self._subject.decoder
        assert decoder is not None
        return [self._stage("codec latents", decoder.quantizer(self._codes(), Carry()))]

    def waveform(self) -> list[Outcome]:
        """Codes to samples."""
        decoder = self._subject.decoder
        assert decoder is not None
        got = np.array(decoder.decode(self._codes())[0])
        limit, relative = self._limits.wave, self._limits.relative
        wanted = self._dump["codec.wave"]
        return [values("waveform", got, wanted, limit, relative=relative, axes="sample")]

    def streamed(self) -> list[Outcome]:
        """The same in small, uneven chunks with carried state."""
        return [streamed_against_whole(self._subject, self._codes())]

    def encoded(self) -> list[Outcome]:
        """Samples to codes. A tie excuses the later books of its frame, which code what it left."""
        encoder, decoder = self._subject.encoder, self._subject.decoder
        assert encoder is not None
        assert decoder is not None
        wave, wanted = self._dump["codec.encode.wave"], self._dump["codec.encode.codes"]
        margins = self._dump["codec.encode.margins"]
        got = np.array(encoder.encode(mx.array(wave)[None], decoder.quantizer)[0][0])
        if got.shape != wanted.shape:
            message = f"{got.shape[1]} frames, the dump has {wanted.shape[1]}"
            return [Outcome(rung="codec codes", state="failed", message=message)]
        ties, equal = 0, float((got == wanted).mean())
        for frame in np.flatnonzero((got != wanted).any(axis=0)):
            book = int(np.flatnonzero(got[:, frame] != wanted[:, frame])[0])
            margin = float(margins[book, frame])
            if margin < self._limits.tie:
                ties += 1
                continue
            return [
                Outcome(
                    rung="codec codes",
                    state="failed",
                    worst=margin,
                    limit=self._limits.tie,
                    compared=wanted.size,
                    ties=ties,
                    agreement=equal,
                    message=(
                        f"first differing frame {frame}: {got[:, frame].tolist()}, the dump has"
                        f" {wanted[:, frame].tolist()}; in book {book} its own entry is nearer by"
                        f" {margin:.2e}"
                    ),
                )
            ]
        return [
            Outcome(
                rung="codec codes",
                state="passed",
                compared=wanted.size,
                ties=ties,
                agreement=equal,
            )
        ]

    def _codes(self) -> mx.array:
        return mx.array(self._dump["codec.codes"])[None]

    def _stage(self, rung: str, got: mx.array) -> Outcome:
        wanted = self._dump[f"codec.{rung.removeprefix('codec ')}"]
        relative = self._limits.relative
        return values(
            rung,
            np.array(got[0]),
            wanted,
            self._limits.stage,
            relative=relative,
            axes="step, channel",
        )


def streamed_against_whole(subject: Subject, codes: mx.array) -> Outcome:
    """Decoding of codes [1, 10, F] in small, uneven chunks against our own whole decoding."""
    assert subject.decoder is not None
    whole = np.array(subject.decoder.decode(codes)[0])
    got = streamed_wave(subject, codes)
    return values("waveform streamed", got, whole, STREAMED_LIMIT, relative=False, axes="sample")


def streamed_wave(subject: Subject, codes: mx.array) -> Array:
    """Decode codes [1, 10, F] in small, uneven chunks."""
    decoder = subject.decoder
    assert decoder is not None
    state, at, turn, pieces = decoder.initial_state(1), 0, 0, []
    while at < codes.shape[2]:
        size = STREAMED_CHUNKS[turn % len(STREAMED_CHUNKS)]
        samples, state = decoder.step(codes[..., at : at + size], state)
        mx.eval(samples, state)
        pieces.append(np.array(samples[0]))
        at, turn = at + size, turn + 1
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
