"""The user's object: load a model, say a text, stream it while it is generated."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.audio import read_clip, write_audio
from warble_mlx.backend import default_dtype, on_gpu
from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.config import read_config, read_config_json
from warble_mlx.engine import Engine, FinishReason, Request, Sampling
from warble_mlx.errors import BudgetError, CheckpointError, TextError, VoiceError, WarbleError
from warble_mlx.hub import bundle_for, bundled_folder
from warble_mlx.prompt import PromptBuilder, Reference
from warble_mlx.text import speakable
from warble_mlx.voices import Voice, read_voices
from warble_mlx.weights import DECODER_FILE, ENCODER_FILE, load_dual_ar, load_strictly

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MAX_SEED = 2**32 - 1
# Frames per decoded chunk: a small first one for an early sound, then larger ones. Few lengths,
# so that few shapes occur.
FIRST_CHUNK = 4
NEXT_CHUNK = 16
# Nobody speaks faster: a budget below this cannot hold the text.
MAX_CHARACTERS_PER_SECOND = 25.0


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds since the call, and the parts that generation and codec took."""

    first_audio_s: float
    generate_s: float
    codec_s: float
    total_s: float


class Chunk(NamedTuple):
    """A piece of a stream: float32 samples [n] and the frames [begin, end) they come from."""

    samples: npt.NDArray[np.float32]
    begin: int
    end: int


@dataclass(frozen=True)
class Speech:
    """A finished utterance."""

    samples: npt.NDArray[np.float32]  # [frames * frame size], mono, within -1 … 1
    sample_rate: int
    codes: npt.NDArray[np.int32]  # [10, frames]
    finish_reason: FinishReason  # "stop": the model ended it; "length": the budget did
    seed: int
    text: str  # as given to the model, after cleaning
    voice: str | None
    model: str
    timings: Timings

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        return len(self.samples) / self.sample_rate

    @property
    def rtf(self) -> float:
        """Real-time factor: time taken over time spoken; below 1 is faster than real time."""
        return self.timings.total_s / self.seconds if self.seconds else math.inf

    def save(self, path: str | Path) -> Path:
        """Write the audio; the suffix gives the format (wav, flac, mp3, ogg)."""
        path = Path(path)
        write_audio(self.samples, self.sample_rate, path)
        return path


class Stream(Iterator[Chunk]):
    """Chunks of one utterance while it is generated. `speech` is there after the last one.

    Closing it, or leaving its `with` block, stops the generation within a frame.
    """

    def __init__(self, chunks: Iterator[Chunk | Speech]) -> None:
        self._chunks = chunks
        self._speech: Speech | None = None

    def __next__(self) -> Chunk:
        item = next(self._chunks)
        if isinstance(item, Speech):
            self._speech = item
            raise StopIteration
        return item

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating. `speech` stays unavailable unless the stream had ended."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()

    @property
    def speech(self) -> Speech:
        """The whole utterance; raises WarbleError before the stream has ended."""
        if self._speech is None:
            raise WarbleError("the stream has not ended: iterate over it first")
        return self._speech


class Warble:
    """A loaded model. Not thread-safe: MLX arrays belong to the thread that made them."""

    def __init__(
        self, folder: Path, name: str, *, is_bundled: bool = False, dtype: str | None = None
    ) -> None:
        dtype = dtype or default_dtype()
        if dtype not in DTYPES:
            raise WarbleError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.name = name
        self.is_bundled = is_bundled
        self.folder = folder
        self.dtype = dtype
        self.config = read_config(folder)
        self._raw_config = read_config_json(folder)
        generation = self._raw_config.get("generation", {})
        self.defaults = Sampling(
            temperature=generation.get("temperature", Sampling.temperature),
            top_p=generation.get("top_p", Sampling.top_p),
            top_k=generation.get("top_k", Sampling.top_k),
        )
        self.default_max_frames: int = generation.get("max_new_tokens", 512)
        self.max_text_characters: int | None = generation.get("max_text_chars")
        self._voices = read_voices(folder)
        self._prompts = PromptBuilder.from_folder(folder, self.config)
        # The quantised kernels are slow on a CPU, and there the step gains nothing by being
        # traced, while tracing would need a C++ compiler on the user's machine.
        gpu = on_gpu()
        model = load_dual_ar(folder, DTYPES[dtype], dequantize=not gpu)
        self.engine = Engine(model, compiled=gpu)
        self._decoder = CodecDecoder(self.config)
        # The codec runs in float32: 16 bits are audible there.
        load_strictly(self._decoder, folder / DECODER_FILE, mx.float32, {})
        self._encoder: CodecEncoder | None = None

    @property
    def voices(self) -> tuple[Voice, ...]:
        """The model's named voices; empty if it lists none."""
        return self._voices.voices

    @property
    def default_voice(self) -> Voice | None:
        """The voice that speaks unless another is asked for."""
        return self._voices.default_voice

    @property
    def sample_rate(self) -> int:
        """Samples per second of everything this model says."""
        return self.config.codec_sample_rate

    def say(
        self,
        text: str,
        *,
        voice: str | int | None = None,
        ref_audio: str | Path | None = None,
        ref_text: str | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        greedy: bool = False,
        max_seconds: float | None = None,
    ) -> Speech:
        """Speak `text` and return it whole.

        voice: name, number or `speaker N`; ref_audio with ref_text: a clip to sound like, and
        what is said in it. seed: 0 … 2**32 - 1, random if not given (and reported). temperature
        (0 is greedy), top_p and top_k default to the model's own settings. max_seconds: longest
        audio allowed; a result cut by it has finish_reason "length".

        Raises TextError, VoiceError, AudioError, BudgetError (all WarbleError).
        """
        stream = self.stream(
            text,
            voice=voice,
            ref_audio=ref_audio,
            ref_text=ref_text,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            greedy=greedy,
            max_seconds=max_seconds,
        )
        for _ in stream:
            pass
        return stream.speech

    def stream(
        self,
        text: str,
        *,
        voice: str | int | None = None,
        ref_audio: str | Path | None = None,
        ref_text: str | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        greedy: bool = False,
        max_seconds: float | None = None,
    ) -> Stream:
        """Speak `text` and yield `Chunk`s while it is generated; arguments as for `say`.

        Inputs are checked before this returns.
        """
        started = time.perf_counter()
        spoken = speakable(text)
        self._check_length(spoken)
        seed = secrets.randbelow(MAX_SEED + 1) if seed is None else _checked_seed(seed)
        sampling = self._sampling(temperature, top_p, top_k, greedy)
        if ref_audio is None and ref_text is None:
            chosen = self.default_voice if voice is None else self._voices.find(voice)
            reference = None
        else:
            if voice is not None:
                raise VoiceError("give either a voice or a reference clip, not both")
            chosen, reference = None, self._reference(ref_audio, ref_text)
        prompt = self._prompts.build(
            spoken, speaker=chosen.token if chosen else "", reference=reference
        )
        request = Request(
            prompt, self._max_frames(max_seconds, prompt.columns.shape[1], spoken), sampling, seed
        )
        self.engine.check_budget(request)
        return Stream(self._chunks(request, spoken, chosen.name if chosen else None, started))

    def register(self, clip: str | Path, transcript: str) -> Reference:
        """Encode a clip (at most 30 s) into the codes that make a reference voice."""
        return self._reference(clip, transcript)

    # ------------------------------------------------------------------ parts of a call

    def _check_length(self, text: str) -> None:
        limit = self.max_text_characters
        if limit is not None and len(text) > limit:
            raise TextError(
                f"the text has {len(text)} characters, but this model was trained on at most"
                f" {limit} at a time: speak it sentence by sentence"
            )

    def _sampling(
        self, temperature: float | None, top_p: float | None, top_k: int | None, greedy: bool
    ) -> Sampling:
        default = self.defaults
        chosen = Sampling(
            temperature=default.temperature if temperature is None else temperature,
            top_p=default.top_p if top_p is None else top_p,
            top_k=default.top_k if top_k is None else top_k,
        )
        if not (math.isfinite(chosen.temperature) and chosen.temperature >= 0):
            raise WarbleError(f"temperature must be 0 or more, not {chosen.temperature}")
        if not 0 <= chosen.top_p <= 1:
            raise WarbleError(f"top_p must lie in 0 … 1, not {chosen.top_p}")
        if not 0 <= chosen.top_k < 2**31:
            raise WarbleError(f"top_k must be 0 or more, not {chosen.top_k}")
        return Sampling(0.0, chosen.top_p, chosen.top_k) if greedy else chosen

    def _max_frames(self, max_seconds: float | None, prompt: int, text: str) -> int:
        """Frames allowed. Without a wish: the model's default, or what is left of the context."""
        rate = self.config.frame_rate_hz
        if max_seconds is not None:
            if not (math.isfinite(max_seconds) and max_seconds > 0):
                raise BudgetError(f"max_seconds must be more than 0, not {max_seconds}")
            return math.ceil(min(max_seconds, 1e6) * rate)
        room = self.config.max_seq_len - prompt
        needed = math.ceil(len(text) / MAX_CHARACTERS_PER_SECOND * rate)
        if room < needed:
            raise BudgetError(
                f"the prompt has {prompt} positions and the text needs at least {needed} frames,"
                f" but the context holds {self.config.max_seq_len}: shorten the text or the"
                " reference clip"
            )
        return min(self.default_max_frames, room)

    def _reference(self, clip: str | Path | None, transcript: str | None) -> Reference:
        if clip is None or transcript is None:
            missing = "clip" if clip is None else "transcript"
            raise VoiceError(f"a reference needs its {missing}: give clip and transcript together")
        transcript = speakable(transcript, "transcript")
        samples, _ = read_clip(Path(clip))
        if self._encoder is None:
            path = self.folder / ENCODER_FILE
            if not path.is_file():
                raise CheckpointError(
                    f"{self.folder} has no {ENCODER_FILE}, which reading a reference clip needs:"
                    " convert the model again with its encoder"
                )
            encoder = CodecEncoder(self.config)
            load_strictly(encoder, path, mx.float32, {})
            self._encoder = encoder
        codes, lengths = self._encoder.encode(mx.array(samples)[None], self._decoder.quantizer)
        return Reference(transcript, np.array(codes[0, :, : lengths[0]]))

    def _chunks(
        self, request: Request, text: str, voice: str | None, started: float
    ) -> Iterator[Chunk | Speech]:
        state = self._decoder.initial_state(1)
        frames: list[npt.NDArray[np.int32]] = []
        pieces: list[npt.NDArray[np.float32]] = []
        decoded, codec_s, first_audio_s = 0, 0.0, math.nan
        reason: FinishReason | None = None
        emissions = self.engine.generate([request])
        while reason is None:
            emission = next(emissions)
            reason = emission.finish_reason
            if emission.codes is not None:
                frames.append(emission.codes)
            ready = len(frames) - decoded
            if ready < (NEXT_CHUNK if decoded else FIRST_CHUNK) and (reason is None or not ready):
                continue
            begin = time.perf_counter()
            codes = mx.array(np.stack(frames[decoded:], axis=1))[None]
            samples, state = self._decoder.step(codes, state)
            pieces.append(np.array(samples[0]))
            now = time.perf_counter()
            codec_s += now - begin
            if not decoded:
                first_audio_s = now - started
            yield Chunk(pieces[-1], decoded, len(frames))
            decoded = len(frames)
        total_s = time.perf_counter() - started
        empty = np.zeros((self.config.num_codebooks, 0), np.int32)
        yield Speech(
            samples=np.concatenate(pieces) if pieces else np.zeros(0, np.float32),
            sample_rate=self.sample_rate,
            codes=np.stack(frames, axis=1) if frames else empty,
            finish_reason=reason,
            seed=request.seed,
            text=text,
            voice=voice,
            model=self.name,
            timings=Timings(first_audio_s, total_s - codec_s, codec_s, total_s),
        )


def _checked_seed(seed: int) -> int:
    if not 0 <= seed <= MAX_SEED:
        raise WarbleError(f"seed must lie in 0 … {MAX_SEED}, not {seed}")
    return seed


def load(
    model: str | Path | None = None, *, dtype: str | None = None, offline: bool = False
) -> Warble:
    """Load a model: the bundled voice pack, a folder, or a hub id such as `org/name`.

    dtype: float32, float16 or bfloat16 for the transformers' activations; by default bfloat16
    on a GPU and float32 on a CPU. offline: never ask the hub.

    Raises HubError, CheckpointError.
    """
    if model is None:
        folder = bundled_folder()
        config = read_config_json(folder)
        return Warble(
            folder, config.get("name", "bundled voice pack"), is_bundled=True, dtype=dtype
        )
    return Warble(bundle_for(model, offline=offline), str(model), dtype=dtype)
