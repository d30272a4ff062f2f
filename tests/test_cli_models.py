"""`warble voices`, `convert` and `inspect`, with stand-ins for the model and the converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import FRAMES, FakeWarble, Run, model_folder

import warble_mlx
import warble_mlx.convert
from warble_mlx import hub, speech_check
from warble_mlx.errors import CheckpointError, HubError, SickError
from warble_mlx.model_files import BUNDLE_MARK


@pytest.mark.parametrize("args", [("voices",), ("-v", "?"), ("say", "--voice", "?")])
def test_voices_are_listed_without_loading(
    fake: FakeWarble, run: Run, tmp_path: Path, args: tuple[str, ...]
) -> None:
    model_folder(tmp_path / "model")
    result = run(*args, "-m", "model")
    assert result.status == 0
    assert [line.split() for line in result.out.decode().splitlines()] == [
        ["1", "Silas", "en"],
        ["*", "3", "Clara", "clear"],
    ]
    assert not fake.loaded


def test_voices_as_json(fake: FakeWarble, run: Run, tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    listed = json.loads(run("voices", "-m", "model", "--json").out)
    assert [(v["id"], v["name"], v["default"]) for v in listed] == [
        (1, "Silas", False),
        (3, "Clara", True),
    ]


def test_model_without_named_voices(fake: FakeWarble, run: Run, tmp_path: Path) -> None:
    (model_folder(tmp_path / "model") / "voices.json").unlink()
    result = run("voices", "-m", "model")
    assert result.out == b""
    assert "names no voices" in result.err


class Converted:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(warble_mlx.convert, "convert", self)
        monkeypatch.setattr(warble_mlx.convert, "format_report", lambda report: f"table {report}")

    def __call__(self, source: Path, out: Path, **options: Any) -> str:
        accept = options.pop("accept")
        self.calls.append({"source": source, "out": out, **options})
        if accept:
            accept(out)
        return "of sizes"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Converted:
    model_folder(tmp_path / "model")
    return Converted(monkeypatch)


def test_convert_prints_the_report_and_lets_the_result_speak(
    fake: FakeWarble, run: Run, converted: Converted, tmp_path: Path
) -> None:
    result = run("convert", "model", "out", "--codec-dtype", "bfloat16", "--force")
    assert result.status == 0
    assert result.out == b"table of sizes\n"
    (call,) = converted.calls
    assert call.pop("progress") is not None
    assert call == {
        "source": tmp_path / "model",
        "out": Path("out"),
        "codec_dtype": "bfloat16",
        "force": True,
        "source_id": None,
        "revision": None,
    }
    assert fake.loaded == [("out", True)]
    assert fake.asked["text"] == speech_check.TEXT
    assert "check: 2.00 s of speech" in result.err
    assert result.err.endswith('next: warble say -m out "Hello there."\n')


def test_convert_from_the_hub_passes_id_and_commit_on(
    fake: FakeWarble, run: Run, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locate(model: str, *, offline: bool, revision: str | None) -> hub.Source:
        assert (model, offline, revision) == ("org/name", True, "v1")
        return hub.Source(Path("model"), "org/name", "c0ffee")

    monkeypatch.setattr(hub, "locate", locate)
    assert run("convert", "org/name", "out", "--offline", "--revision", "v1").status == 0
    assert converted.calls[0]["source_id"] == "org/name"
    assert converted.calls[0]["revision"] == "c0ffee"


@pytest.mark.parametrize(("finish", "frames"), [("length", FRAMES), ("stop", 0)])
def test_convert_fails_if_the_result_does_not_speak(
    fake: FakeWarble, run: Run, converted: Converted, finish: str, frames: int
) -> None:
    fake.finish_reason, fake.frames = finish, frames
    result = run("convert", "model", "out")
    assert result.status == 2
    assert "the converted model does not speak" in result.err
    assert run("convert", "model", "out", "--no-check").status == 0


def test_convert_of_a_model_that_makes_noise_names_the_way_out(
    fake: FakeWarble, run: Run, converted: Converted
) -> None:
    fake.error = SickError("too-long", "no end came", "it missed its end", "try another seed")
    result = run("convert", "model", "out")
    assert result.status == 2
    assert "the converted model does not speak: no end came; probably it missed" in result.err
    assert "--no-check leaves this test out" in result.err
    assert "dropped" not in result.err
    assert run("convert", "model", "out", "--no-check").status == 0


def test_convert_passes_errors_on(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("unknown tensor x")

    model_folder(tmp_path / "model")
    monkeypatch.setattr(warble_mlx.convert, "convert", fail)
    result = run("convert", "model", "out")
    assert (result.status, result.err) == (2, "warble: unknown tensor x\n")
    result = run("convert", "./missing", "out")
    assert (result.status, result.err) == (2, "warble: there is no folder ./missing\n")


def test_inspect_wants_a_bundle(run: Run, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / BUNDLE_MARK).unlink()
    result = run("inspect", str(folder))
    assert result.status == 2
    assert f"warble convert {folder} OUT" in result.err


def test_failed_download_is_one_line(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise HubError("org/name is not in the cache and downloads are off")

    monkeypatch.setitem(vars(warble_mlx), "load", load)
    result = run("Hi", "-m", "org/name", "--offline", "-o", "x.wav")
    assert (result.status, result.err.count("\n")) == (2, 1)
