"""The Wyoming protocol, which Home Assistant speaks: voices, and speech for text whole or arriving.

A client sends `synthesize`, or `synthesize-start`, chunks of text and `synthesize-stop`. In the
second way each sentence is spoken once the next one begins, all in one stream of audio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.server import AsyncEventHandler, AsyncTcpServer
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from warble_mlx import __version__
from warble_mlx.arriving import ArrivingText
from warble_mlx.errors import TextError, VoiceError, WarbleError
from warble_mlx.live import Pcm
from warble_mlx.options import DEFAULT_PAUSE_S
from warble_mlx.registered import RegisteredVoice
from warble_mlx.server.beside import beside
from warble_mlx.server.settings import Settings
from warble_mlx.server.worker import Audio, End, Job, Outbox, Worker
from warble_mlx.speech import Warble
from warble_mlx.voice_folder import registered_voices

_ATTRIBUTION = Attribution("warble-mlx", "https://huggingface.co/scrappylabsai/warble")
_MODELS_OWN = "default"  # the voice of a model that lists none
_WIDTH = 2  # bytes of a sample


def info(warble: Warble) -> Info:
    """What a `describe` is answered with."""
    voices = [(v.name, v.language, v.description) for v in warble.voices]
    for voice in registered_voices():
        if isinstance(voice, RegisteredVoice):
            voices.append((voice.name, voice.language, voice.description))
    program = TtsProgram(
        name="warble",
        description="Text to speech with Warble and Audio8 models",
        attribution=_ATTRIBUTION,
        installed=True,
        version=__version__,
        supports_synthesize_streaming=True,
        voices=[
            TtsVoice(
                name=name,
                description=description or name,
                attribution=_ATTRIBUTION,
                installed=True,
                version=__version__,
                languages=[language or "en"],
            )
            for name, language, description in voices or [(_MODELS_OWN, "", "The model's own")]
        ],
    )
    return Info(tts=[program])


class Handler(AsyncEventHandler):
    """One client."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        worker: Worker,
        max_text: int,
    ) -> None:
        super().__init__(reader, writer)
        self._max_text = max_text
        self._worker = worker
        self._warble = worker.ready()
        self._arriving: ArrivingText | None = None
        self._voice: SynthesizeVoice | None = None
        self._is_speaking = False  # between audio-start and audio-stop

    async def handle_event(self, event: Event) -> bool:
        """Answer one event; every client may go on after an error."""
        try:
            await self._answer(event)
        except WarbleError as error:
            await self._stop_audio()
            await self.write_event(Error(str(error), type(error).__name__).event())
        except ConnectionError:
            return False
        return True

    async def _answer(self, event: Event) -> None:
        if Describe.is_type(event.type):
            await self.write_event(info(self._warble).event())
        elif SynthesizeStart.is_type(event.type):
            self._voice = SynthesizeStart.from_event(event).voice
            self._arriving = ArrivingText()
        elif SynthesizeChunk.is_type(event.type) and self._arriving is not None:
            for sentence in self._arriving.add(SynthesizeChunk.from_event(event).text):
                await self._speak(sentence, self._voice)
        elif SynthesizeStop.is_type(event.type) and self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            try:
                for sentence in arriving.finish():
                    await self._speak(sentence, self._voice)
                await self._stop_audio()
            finally:  # without it the client would wait for ever
                await self.write_event(SynthesizeStopped().event())
        elif Synthesize.is_type(event.type) and self._arriving is None:
            # While text arrives, the same comes once more as a whole, for older servers.
            asked = Synthesize.from_event(event)
            await self._speak(asked.text, asked.voice)
            await self._stop_audio()

    async def _speak(self, text: str, voice: SynthesizeVoice | None) -> None:
        """Send the audio of a text. Raises WarbleError."""
        if len(text) > self._max_text:
            raise TextError(f"the text has {len(text)} characters, at most {self._max_text} can be")
        outbox = Outbox()
        job = Job(text, {"voice": self._chosen(voice)}, outbox.put)
        self._worker.submit(job)
        follows, pcm = self._is_speaking, Pcm(self._warble.sample_rate)
        try:
            while not isinstance(out := await outbox.get(), End):
                if not isinstance(out, Audio):
                    continue
                if not self._is_speaking:
                    await self.write_event(AudioStart(**self._format).event())
                    self._is_speaking = True
                if follows:
                    follows = False
                    await self._send(bytes(_WIDTH * round(DEFAULT_PAUSE_S * self._format["rate"])))
                await self._send(pcm.encode(out.samples))
                job.taken += out.samples.size
        finally:
            job.give_up("client-left")
        if out.status != 200:
            raise WarbleError(out.message)

    async def _send(self, audio: bytes) -> None:
        await self.write_event(AudioChunk(audio=audio, **self._format).event())

    async def _stop_audio(self) -> None:
        if self._is_speaking:
            self._is_speaking = False
            await self.write_event(AudioStop().event())

    @property
    def _format(self) -> dict[str, int]:
        return {"rate": self._warble.sample_rate, "width": _WIDTH, "channels": 1}

    def _chosen(self, voice: SynthesizeVoice | None) -> str | None:
        """The voice's name; VoiceError for a language that nobody speaks."""
        if voice is None or voice.name == _MODELS_OWN:
            return None
        if voice.name or not voice.language:
            return voice.name
        wanted = voice.language.replace("_", "-").casefold()
        own = [v for v in self._warble.voices if v.language]
        for length in (None, 1):  # the very same, else the same language elsewhere
            for known in own:
                parts = known.language.casefold().split("-")[:length]
                if parts == wanted.split("-")[:length]:
                    return known.name
        spoken = ", ".join(sorted({v.language for v in own})) or "none is known"
        raise VoiceError(f"no voice speaks {voice.language}; there is: {spoken}")


def run_wyoming(
    load: Callable[[], Warble],
    settings: Settings,
    host: str,
    port: int,
    tell: Callable[[str], None],
) -> None:
    """Load the model by `load` and serve Home Assistant until SIGINT or SIGTERM.

    tell: gets a sentence once clients can come. Raises WarbleError for an address that cannot be
    had.
    """
    worker = Worker(load, settings)
    ending: list[Callable[[], None]] = [worker.stop]

    async def serve() -> None:
        server = AsyncTcpServer(host, port)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(stop.set)

        ending.append(end)
        await server.start(
            lambda reader, writer: Handler(reader, writer, worker, settings.max_text)
        )
        tell(f"{worker.ready().name} serves Wyoming at tcp://{host}:{port} (Ctrl-C ends it)")
        await stop.wait()
        await server.stop()

    def talk() -> None:
        worker.ready()
        asyncio.run(serve())

    try:
        beside(worker, talk, lambda: ending[-1]())
    except OSError as error:
        raise WarbleError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): choose another with"
            " --port or --host"
        ) from error
