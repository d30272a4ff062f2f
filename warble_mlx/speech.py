"""The user's object: load a model, say a text, stream it while it is generated."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from warble_mlx.backend import default_dtype, on_gpu
from warble_mlx.clip_files import Span
from warble_mlx.clips import prepare_clip
from warble_mlx.codec import CodecDecoder
from warble_mlx.config import read_config, read_config_json
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.errors import WarbleError
from warble_mlx.hub import bundle_for, bundled_folder
from warble_mlx.languages import language_doubts
from warble_mlx.options import (
    Options,
    longest_of,
    pause_of,
    refuse_unknown,
    retry_of,
    sampling_of,
    seed_of,
)
from warble_mlx.prompt import Prompt, PromptBuilder
from warble_mlx.reading import (
    FIRST_CHUNK,
    NEXT_CHUNK,
    NOTHING_DONE,
    Plan,
    Progress,
    Reading,
    part_limit,
    utterance_frames,
)
from warble_mlx.registered import (
    RegisteredVoice,
    check_description,
    check_free,
    check_language,
)
from warble_mlx.results import Speech, Timings
from warble_mlx.speakers import Speakers
from warble_mlx.splitting import DEFAULT_LANGUAGE, joined, split
from warble_mlx.streaming import AsyncStream, Stream, computing_thread
from warble_mlx.text import speakable
from warble_mlx.voices import Voice
from warble_mlx.weights import DECODER_FILE, load_dual_ar, load_strictly

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncStream", "Speech", "Stream", "Timings", "Warble", "load"]

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Warble:
    """A loaded model. Not thread-safe: MLX arrays belong to the thread that made them."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        is_bundled: bool = False,
        dtype: str | None = None,
        dequantize: bool = False,
    ) -> None:
        dtype = dtype or default_dtype()
        if dtype not in DTYPES:
            raise WarbleError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.name = name
        self.is_bundled = is_bundled
        self.folder = folder
        self.dtype = dtype
        self.config = read_config(folder)
        raw_config = read_config_json(folder)
        generation = raw_config.get("generation", {})
        self.defaults = Sampling(
            temperature=generation.get("temperature", Sampling.temperature),
            top_p=generation.get("top_p", Sampling.top_p),
            top_k=generation.get("top_k", Sampling.top_k),
        )
        self.default_max_frames: int = generation.get("max_new_tokens", 512)
        self.max_text_characters: int | None = generation.get("max_text_chars")
        self._prompts = PromptBuilder.from_folder(folder, self.config)
        # The quantised kernels are slow on a CPU, and there the step gains nothing by being
        # traced, while tracing would need a C++ compiler on the user's machine.
        gpu = on_gpu()
        model = load_dual_ar(folder, DTYPES[dtype], dequantize=dequantize or not gpu)
        self.engine = Engine(model, compiled=gpu)
        self._decoder = CodecDecoder(self.config)
        # The codec runs in float32: 16 bits are audible there.
        load_strictly(self._decoder, folder / DECODER_FILE, mx.float32, {})
        self._speakers = Speakers(folder, self.config, raw_config, self._decoder.quantizer)

    def __repr__(self) -> str:
        return f"<Warble {self.name!r}, {self.dtype}>"

    @property
    def voices(self) -> tuple[Voice, ...]:
        """The model's named voices; empty if it lists none."""
        return self._speakers.own.voices

    @property
    def default_voice(self) -> Voice | None:
        """The voice that speaks unless another is asked for."""
        return self._speakers.own.default_voice

    @property
    def sample_rate(self) -> int:
        """Samples per second of everything this model says."""
        return self.config.codec_sample_rate

    def say(self, text: str, **options: Unpack[Options]) -> Speech:
        """Speak `text` and return it whole. What may be asked: `warble_mlx.options.Options`.

        The text may have any length: it is spoken in pieces that share the voice, with `pause_s`
        seconds of silence between sentences where two pieces meet, and twice that between
        paragraphs (blank lines). `<break time="800ms"/>` in it is silence of that length.

        Raises TextError, VoiceError, AudioError, BudgetError, SickError (all WarbleError).
        """
        stream = self.stream(text, keep_samples=True, **options)
        for _ in stream:
            pass
        return stream.speech

    def stream(
        self, text: str, *, keep_samples: bool = False, **options: Unpack[Options]
    ) -> Stream:
        """Speak `text` and yield `Chunk`s while it is generated; text and options as for `say`.

        Inputs are checked before this returns. The samples of earlier chunks are forgotten, so
        that memory does not grow, unless keep_samples asks for them in the final `speech`.
        """
        started = time.perf_counter()
        plan = self.plan(text, **options)
        earlier = Progress(total_s=time.perf_counter() - started)
        return self.perform(plan, earlier, keep_samples=keep_samples)

    def astream(
        self, text: str, *, keep_samples: bool = False, **options: Unpack[Options]
    ) -> AsyncStream:
        """`stream` for an event loop: `async for chunk in warble.astream("…")`.

        Inputs are checked when the `async with` block is entered or the first chunk is asked for.
        All such streams of a model share one thread and take turns chunk by chunk; do not speak
        from another thread while one of them is waited for.
        """
        refuse_unknown(options)
        return AsyncStream(
            lambda: self.stream(text, keep_samples=keep_samples, **options), self._worker
        )

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return computing_thread()

    def plan(self, text: str, **options: Unpack[Options]) -> Plan:
        """Check everything and split the text, but generate nothing; as for `say`."""
        refuse_unknown(options)
        sampling = sampling_of(options, self.defaults)
        seed, retry, pause_s = seed_of(options), retry_of(options), pause_of(options)
        longest = longest_of(options, self.config.frame_rate_hz)
        speakable(text)  # before the voice is read, which may take long
        speaker = self._speakers.choose(options)

        def rewritten(words: str) -> str:
            if not options.get("normalise"):
                return words
            from warble_mlx.normalise import normalised  # only wanted by a few

            return normalised(words, speaker.language)

        def prompt_of(words: str) -> Prompt:
            return self._prompts.build(words, speaker=speaker.token, reference=speaker.reference)

        limit = part_limit(
            self.config,
            prompt_of("a").columns.shape[1],
            self.default_max_frames,
            self.max_text_characters,
            own_voice=not speaker.token and speaker.reference is None,
        )
        parts = split(text, limit, speaker.language or DEFAULT_LANGUAGE, rewritten)
        plan = Plan(
            parts,
            speaker.token,
            speaker.reference,
            speaker.name,
            sampling,
            seed,
            pause_s,
            longest,
            retry=0 if sampling.greedy else retry,
            warnings=language_doubts(joined(parts), speaker.name, speaker.language),
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
        return Stream(self.reading(plan, earlier), self.name, self.sample_rate, keep_samples)

    def reading(
        self,
        plan: Plan,
        earlier: Progress = NOTHING_DONE,
        chunk_frames: tuple[int, int] = (FIRST_CHUNK, NEXT_CHUNK),
    ) -> Reading:
        """A plan to be spoken beside others in a `warble_mlx.ensemble.Ensemble`.

        chunk_frames: frames of the first chunk of samples, and of each that follows.
        """
        return Reading(
            plan,
            self.engine,
            self._prompts,
            self._decoder,
            self.default_max_frames,
            earlier,
            chunk_frames,
        )

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
        named = "" if name is None else check_free(name, self._speakers.own)
        description, language = check_description(description), check_language(language)
        samples, spoken, info = prepare_clip(clip, transcript, clip_seconds)
        return RegisteredVoice(
            name=named,
            transcript=spoken,
            codes=self._speakers.encode(samples),
            codec=self._speakers.codec,
            description=description,
            language=language,
            clip_seconds=info.seconds,
            clip_sample_rate=info.sample_rate,
            warnings=info.warnings,
        )


def load(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    offline: bool = False,
    dequantize: bool = False,
) -> Warble:
    """Load a model: the bundled voice pack, a folder, or a hub id such as `org/name`.

    dtype: float32, float16 or bfloat16 for the transformers' activations; by default bfloat16
    on a GPU and float32 on a CPU. offline: never ask the hub. dequantize: unpack quantised
    weights while loading, as is always done on a CPU.

    Raises HubError, CheckpointError.
    """
    if model is None:
        folder = bundled_folder()
        config = read_config_json(folder)
        return Warble(
            folder,
            config.get("name", "bundled voice pack"),
            is_bundled=True,
            dtype=dtype,
            dequantize=dequantize,
        )
    folder = bundle_for(model, offline=offline)
    return Warble(folder, str(model), dtype=dtype, dequantize=dequantize)
