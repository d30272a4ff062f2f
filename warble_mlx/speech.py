"""The user's object: load a model, say a text, stream it while it is generated."""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.audio import write_audio
from warble_mlx.backend import default_dtype, on_gpu
from warble_mlx.clip_files import Span
from warble_mlx.clips import prepare_clip
from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.config import read_config, read_config_json
from warble_mlx.engine import Engine, FinishReason, Request, Sampling
from warble_mlx.errors import (
    BudgetError,
    CheckpointError,
    SickError,
    VoiceError,
    VoiceWarning,
    WarbleError,
)
from warble_mlx.hub import bundle_for, bundled_folder
from warble_mlx.languages import language_doubts
from warble_mlx.prompt import Prompt, PromptBuilder, Reference
from warble_mlx.reading import (
    DEFAULT_PAUSE_S,
    NOTHING_DONE,
    Chunk,
    Piece,
    Plan,
    Progress,
    Reading,
    part_limit,
    utterance_frames,
)
from warble_mlx.registered import (
    SUFFIX,
    Codec,
    RegisteredVoice,
    check_description,
    check_free,
    check_language,
    read_voice,
)
from warble_mlx.splitting import DEFAULT_LANGUAGE, LONGEST_BREAK_S, joined, split
from warble_mlx.text import speakable
from warble_mlx.voice_folder import find_registered, voice_files
from warble_mlx.voices import Voice, is_number, read_voices
from warble_mlx.weights import DECODER_FILE, ENCODER_FILE, load_dual_ar, load_strictly

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MAX_SEED = 2**32 - 1
MAX_RETRIES = 3


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds since the call, and the parts that generation and codec took."""

    first_audio_s: float
    generate_s: float
    codec_s: float
    total_s: float


@dataclass(frozen=True)
class Speech:
    """What was said: an utterance, or a long text in several pieces with silence between them."""

    samples: npt.NDArray[np.float32]  # [n], mono, within -1 … 1; empty if they were only streamed
    sample_rate: int
    codes: npt.NDArray[np.int32]  # [10, frames] of all pieces
    finish_reason: FinishReason  # "stop": the model ended it; "length": a budget cut some of it
    seed: int
    text: str  # as given to the model, after cleaning
    voice: str | None
    model: str
    timings: Timings
    warnings: tuple[str, ...] = ()  # sentences on what may not have been spoken well
    # Attempts that were no speech and were dropped. `seed` is the last one's, but for a text of
    # several pieces it is the one that all of them follow from: `pieces` have their own.
    retries: int = 0
    pieces: tuple[Piece, ...] = ()
    streamed: int | None = None  # number of samples, if they were not kept

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        length = len(self.samples) if self.streamed is None else self.streamed
        return length / self.sample_rate

    @property
    def rtf(self) -> float:
        """Real-time factor: time taken over time spoken; below 1 is faster than real time."""
        return self.timings.total_s / self.seconds if self.seconds else math.inf

    def save(self, path: str | Path) -> Path:
        """Write the audio; the suffix gives the format (wav, flac, mp3, ogg).

        Raises WarbleError if it was streamed without keeping the samples.
        """
        if self.streamed is not None:
            raise WarbleError(
                "this speech was streamed and its samples were not kept: use say(), or"
                " stream(..., keep_samples=True)"
            )
        path = Path(path)
        write_audio(self.samples, self.sample_rate, path)
        return path


class Stream(Iterator[Chunk]):
    """Chunks of a speech while it is generated. `speech` is there after the last one.

    Closing it, or leaving its `with` block, stops the generation within a frame.
    """

    def __init__(self, reading: Reading, model: str, sample_rate: int, keep_samples: bool) -> None:
        self._reading = reading
        self._model, self._sample_rate = model, sample_rate
        self._kept: list[npt.NDArray[np.float32]] | None = [] if keep_samples else None
        self._chunks = reading.chunks()
        self._is_closed = False
        self._speech: Speech | None = None

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            if isinstance(error, SickError):
                error.warnings = self._reading.plan.warnings
            self._is_closed = True  # a generator that has raised looks like one at its end
            raise
        if chunk is None:
            if self._speech is None and not self._is_closed:
                self._speech = self._whole()
            raise StopIteration
        if self._kept is not None:
            self._kept.append(chunk.samples)
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating. `speech` stays unavailable unless the stream had ended."""
        self._is_closed = True
        self._chunks.close()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of the text that are finished. One is here before the chunk after it is."""
        return tuple(self._reading.pieces)

    @property
    def progress(self) -> Progress:
        """What `Warble.perform` needs to go on behind the last of `pieces`."""
        return self._reading.progress

    @property
    def speech(self) -> Speech:
        """The whole speech; raises WarbleError before the stream has ended.

        Its `samples` are empty unless the stream was made with keep_samples.
        """
        if self._speech is None:
            raise WarbleError("the stream has not ended: iterate over it first")
        return self._speech

    def _whole(self) -> Speech:
        reading, plan = self._reading, self._reading.plan
        total_s, codec_s = reading.total_s, reading.codec_s
        kept = self._kept
        return Speech(
            samples=np.concatenate(kept) if kept else np.zeros(0, np.float32),
            sample_rate=self._sample_rate,
            codes=reading.all_codes,
            finish_reason=reading.finish_reason,
            seed=reading.pieces[0].seed if len(reading.pieces) == 1 else plan.seed,
            text=plan.text,
            voice=plan.voice,
            model=self._model,
            timings=Timings(reading.first_audio_s, total_s - codec_s, codec_s, total_s),
            warnings=plan.warnings,
            retries=reading.retries,
            pieces=tuple(reading.pieces),
            streamed=None if kept is not None else reading.position,
        )


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
        voice: str | int | Path | RegisteredVoice | None = None,
        ref_audio: str | Path | None = None,
        ref_text: str | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        greedy: bool = False,
        max_seconds: float | None = None,
        retry: int = 0,
        normalise: bool = False,
        pause_s: float = DEFAULT_PAUSE_S,
    ) -> Speech:
        """Speak `text` and return it whole.

        voice: name, number or `speaker N` of one of the model's voices, the name of a registered
        voice, a `RegisteredVoice`, or the `Path` of a voice file (a string never is one);
        ref_audio with ref_text: a clip to sound like, and what is said in it; doubts about it are
        issued as VoiceWarning. seed: 0 … 2**32 - 1, random if not given (and reported).
        temperature (0 is greedy), top_p and top_k default to the model's own settings.
        max_seconds: longest audio allowed; a result cut by it has finish_reason "length".
        retry: how often to try a piece again, with a seed derived from the last, when it is no
        speech; `Speech.retries` says how often that was. Greedy speech is always the same, so it
        is not tried again. normalise: read Markdown, links, emoji and numbers as a person would,
        which needs the extra `text`; numbers only for a voice whose language is known.

        The text may have any length: it is spoken in pieces that share the voice, with `pause_s`
        seconds of silence between sentences where two pieces meet, and twice that between
        paragraphs (blank lines). `<break time="800ms"/>` in it is silence of that length.

        Raises TextError, VoiceError, AudioError, BudgetError, SickError (all WarbleError).
        """
        started = time.perf_counter()
        plan = self.plan(
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
            retry=retry,
            normalise=normalise,
            pause_s=pause_s,
        )
        earlier = Progress(total_s=time.perf_counter() - started)
        stream = self.perform(plan, earlier, keep_samples=True)
        for _ in stream:
            pass
        return stream.speech

    def stream(
        self,
        text: str,
        *,
        voice: str | int | Path | RegisteredVoice | None = None,
        ref_audio: str | Path | None = None,
        ref_text: str | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        greedy: bool = False,
        max_seconds: float | None = None,
        normalise: bool = False,
        pause_s: float = DEFAULT_PAUSE_S,
        keep_samples: bool = False,
    ) -> Stream:
        """Speak `text` and yield `Chunk`s while it is generated; arguments as for `say`.

        Inputs are checked before this returns. The samples of earlier chunks are forgotten, so
        that memory does not grow, unless keep_samples asks for them in the final `speech`.
        """
        started = time.perf_counter()
        plan = self.plan(
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
            normalise=normalise,
            pause_s=pause_s,
        )
        earlier = Progress(total_s=time.perf_counter() - started)
        return self.perform(plan, earlier, keep_samples=keep_samples)

    def plan(
        self,
        text: str,
        *,
        voice: str | int | Path | RegisteredVoice | None = None,
        ref_audio: str | Path | None = None,
        ref_text: str | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        greedy: bool = False,
        max_seconds: float | None = None,
        retry: int = 0,
        normalise: bool = False,
        pause_s: float = DEFAULT_PAUSE_S,
    ) -> Plan:
        """Check everything and split the text, but generate nothing; arguments as for `say`."""
        if not 0 <= retry <= MAX_RETRIES:
            raise WarbleError(f"retry must lie in 0 … {MAX_RETRIES}, not {retry}")
        if not (math.isfinite(pause_s) and 0 <= pause_s <= LONGEST_BREAK_S):
            raise WarbleError(f"pause_s must lie in 0 … {LONGEST_BREAK_S:.0f}, not {pause_s}")
        seed = secrets.randbelow(MAX_SEED + 1) if seed is None else _checked_seed(seed)
        sampling = self._sampling(temperature, top_p, top_k, greedy)
        longest = None if max_seconds is None else self._longest(max_seconds)
        speakable(text)  # before the voice is read, which may take long
        speaker, reference, name = self._voice(voice, ref_audio, ref_text)
        language = next((v.language for v in self.voices if v.token == speaker), "")

        def rewritten(words: str) -> str:
            if not normalise:
                return words
            from warble_mlx.normalise import normalised  # only wanted by a few

            return normalised(words, language)

        def prompt_of(words: str) -> Prompt:
            return self._prompts.build(words, speaker=speaker, reference=reference)

        limit = part_limit(
            self.config,
            prompt_of("a").columns.shape[1],
            self.default_max_frames,
            self.max_text_characters,
            own_voice=not speaker and reference is None,
        )
        parts = split(text, limit, language or DEFAULT_LANGUAGE, rewritten)
        plan = Plan(
            parts,
            speaker,
            reference,
            name,
            sampling,
            seed,
            pause_s,
            longest,
            retry=0 if sampling.greedy else retry,
            warnings=language_doubts(joined(parts), name, language),
        )
        first = plan.spoken[0].text
        prompt = prompt_of(first)
        frames = utterance_frames(
            self.config, self.default_max_frames, prompt.columns.shape[1], first
        )
        # A wish that one utterance can never fulfil is refused; a longer text may use it up.
        if len(parts) == 1 and longest is not None:
            frames = longest
        self.engine.check_budget(Request(prompt, frames, sampling, seed))
        return plan

    def perform(
        self, plan: Plan, earlier: Progress = NOTHING_DONE, *, keep_samples: bool = False
    ) -> Stream:
        """Speak a plan, or what is left of it after the finished pieces of an `earlier` stream."""
        reading = Reading(
            plan, self.engine, self._prompts, self._decoder, self.default_max_frames, earlier
        )
        return Stream(reading, self.name, self.sample_rate, keep_samples)

    def register(
        self,
        clip: str | Path,
        transcript: str,
        name: str | None = None,
        *,
        description: str = "",
        language: str = "",
        clip_seconds: Span | None = None,
    ) -> RegisteredVoice:
        """Make a voice of a clip (0.3 to 30 s) and what is said in it: pass it as `voice=`.

        name: needed only to `save` it. clip_seconds: the part (begin, end) of the clip to use,
        whose words the transcript then is. What may spoil the voice is in its `warnings`.

        Raises AudioError, VoiceError, TextError; CheckpointError for a model without an encoder.
        """
        named = "" if name is None else check_free(name, self._voices)
        description, language = check_description(description), check_language(language)
        samples, spoken, info = prepare_clip(clip, transcript, clip_seconds)
        return RegisteredVoice(
            name=named,
            transcript=spoken,
            codes=self._encode(samples),
            codec=self._codec,
            description=description,
            language=language,
            clip_seconds=info.seconds,
            clip_sample_rate=info.sample_rate,
            warnings=info.warnings,
        )

    # ------------------------------------------------------------------ parts of a call

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

    def _longest(self, max_seconds: float) -> int:
        """Frames of the longest speech allowed."""
        if not (math.isfinite(max_seconds) and max_seconds > 0):
            raise BudgetError(f"max_seconds must be more than 0, not {max_seconds}")
        return math.ceil(min(max_seconds, 1e6) * self.config.frame_rate_hz)

    @cached_property
    def _codec(self) -> Codec:
        return Codec.of(self.folder, self.config, self._raw_config)

    def _voice(
        self,
        voice: str | int | Path | RegisteredVoice | None,
        ref_audio: str | Path | None,
        ref_text: str | None,
    ) -> tuple[str, Reference | None, str | None]:
        """What was asked for, as speaker token, reference and name."""
        if ref_audio is not None or ref_text is not None:
            if voice is not None:
                raise VoiceError("give either a voice or a reference clip, not both")
            return "", self._reference(ref_audio, ref_text), None
        if voice is None:
            own = self.default_voice
            return (own.token, None, own.name) if own else ("", None, None)
        if isinstance(voice, Path):
            voice = read_voice(voice)
        found = voice if isinstance(voice, RegisteredVoice) else self._named(voice)
        if isinstance(found, Voice):
            return found.token, None, found.name
        found.check_codec(self._codec, self.config.frame_rate_hz)
        return "", found.reference, found.name or None

    def _named(self, wanted: str | int) -> Voice | RegisteredVoice:
        """A voice of the model, else one of the voice folder; VoiceError that lists both."""
        try:
            return self._voices.find(wanted)
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

    def _reference(self, clip: str | Path | None, transcript: str | None) -> Reference:
        if clip is None:
            raise VoiceError(
                "a reference needs its clip: give clip and transcript together"
                " (reference-audio-required)"
            )
        if transcript is None:
            raise VoiceError(
                "a reference needs its transcript: give clip and transcript together"
                " (reference-text-required)"
            )
        samples, spoken, info = prepare_clip(clip, transcript)
        for doubt in info.warnings:
            warnings.warn(doubt, VoiceWarning, stacklevel=5)
        return Reference(spoken, self._encode(samples))

    def _encode(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Codes int32 [10, frames] of mono samples [n] at 44.1 kHz."""
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
        return np.array(codes[0, :, : lengths[0]]).astype(np.int32)


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
