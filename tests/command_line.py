"""A command line in this process, with a stand-in for the model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import warble_mlx
import warble_mlx.convert
from warble_mlx import cli, player
from warble_mlx.model_files import BUNDLE_MARK
from warble_mlx.reading import Chunk
from warble_mlx.results import Speech, Timings

FRAMES = 43


class FakeStream:
    """Says in chunks what was said as a whole."""

    def __init__(self, speech: Speech) -> None:
        self.speech = speech
        self.plan = SimpleNamespace(slowest_s=9.0, burst_s=lambda _rate: 0.8)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Chunk]:
        for part in np.array_split(self.speech.samples, 5):
            yield Chunk(part, 0, 0)


class FakeWarble:
    """Speaks a tone of two seconds and keeps what it was asked."""

    def __init__(self) -> None:
        self.name = 'voice pack "Test"'
        self.is_bundled = False
        self.sample_rate = 44_100
        self.config = SimpleNamespace(frame_rate_hz=21.53)
        self.loaded: list[tuple[Any, bool]] = []
        self.said: list[dict[str, Any]] = []
        self.finish_reason = "stop"
        self.frames = FRAMES
        self.error: BaseException | None = None
        self.dequantized = False

    def load(
        self,
        model: Any = None,
        *,
        dtype: Any = None,
        offline: bool = False,
        dequantize: bool = False,
    ) -> FakeWarble:
        self.dequantized = dequantize
        self.loaded.append((model, offline))
        return self

    def say(self, text: str, **options: Any) -> Speech:
        self.said.append({"text": text, **options})
        if self.error:
            raise self.error
        length = self.frames * 2048
        return Speech(
            samples=(0.5 * np.sin(np.arange(length) / 20)).astype(np.float32),
            sample_rate=44_100,
            codes=np.ones((10, self.frames), np.int32),
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            seed=1234 if options.get("seed") is None else options["seed"],
            text=text.strip(),
            voice="Silas",
            model=self.name,
            timings=Timings(0.32 if self.frames else float("nan"), 0.9, 0.2, 1.1),
        )

    def stream(self, text: str, **options: Any) -> FakeStream:
        return FakeStream(self.say(text, **options))

    @property
    def asked(self) -> dict[str, Any]:
        (said,) = self.said
        return said


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWarble:
    fake = FakeWarble()
    # The name is imported on first use, so it may not be there yet: the dictionary, not the object.
    monkeypatch.setitem(vars(warble_mlx), "load", fake.load)
    monkeypatch.setattr(player, "can_play", lambda: False)
    monkeypatch.chdir(tmp_path)
    return fake


class Result(SimpleNamespace):
    status: int
    out: bytes
    err: str


Run = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*args: str, stdin: bytes | None = None) -> Result:
        """Run the command line; without `stdin` a person sits at the keyboard."""
        kind = Terminal if stdin is None else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin or b"")))
        status = cli.main(args)
        out, err = capfdbinary.readouterr()
        return Result(status=status, out=out, err=err.decode())

    return run


def model_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", BUNDLE_MARK):
        (path / name).write_text("{}")
    voices = [
        {"id": 1, "name": "Silas", "token": "<|speaker:1|>", "language": "en"},
        {"id": 3, "name": "Clara", "token": "<|speaker:3|>", "description": "clear"},
    ]
    (path / "voices.json").write_text(json.dumps({"default": 3, "voices": voices}))
    return path
