"""`warble doctor`."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import warble_mlx
from warble_mlx import backend, cli, doctor, player
from warble_mlx.errors import CheckpointError
from warble_mlx.results import Speech, Timings

GOLDEN = np.array(json.loads(doctor.SELF_TEST.read_text())["codes"], np.int32)
FRAMES = GOLDEN.shape[1]


class FakeWarble:
    def __init__(self, frames: int = FRAMES, finish: str = "stop", level: float = 0.1) -> None:
        self.frames, self.finish, self.level = frames, finish, level

    def say(self, text: str, **options: Any) -> Speech:
        assert options == {"greedy": True, "seed": 0}
        samples = np.full(self.frames * 2048, self.level, np.float32)
        codes = np.resize(GOLDEN, (10, self.frames)) if self.frames else GOLDEN[:, :0]
        timings = Timings(0.1, 0.1, 0.1, 0.2)
        finish: Any = self.finish
        return Speech(samples, 44_100, codes, finish, 0, text, None, "voice pack", timings)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    speaks(monkeypatch, FakeWarble())


def speaks(monkeypatch: pytest.MonkeyPatch, warble: FakeWarble) -> None:
    monkeypatch.setitem(vars(warble_mlx), "load", lambda: warble)


def found(name: str) -> doctor.Check:
    (check,) = [check for check in doctor.examine() if check.name == name]
    return check


@pytest.mark.usefixtures("healthy")
def test_everything_is_examined(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capfd.readouterr().out
    wanted = "python system warble-mlx mlx device dtype blas libraries memory disk caches self-test"
    for name in wanted.split():
        assert f"\n{name} " in f"\n{out}"
    assert "\ngolden codes" in out
    assert f"{FRAMES} frames, stop, RTF" in out
    assert out.splitlines()[-1].split(maxsplit=1) == ["result", "all is well"]


@pytest.mark.usefixtures("healthy")
def test_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)}
    assert checks["dtype"]["found"] == backend.default_dtype()
    assert checks["self-test"]["state"] == "good"


@pytest.mark.parametrize(
    ("warble", "words"),
    [
        (FakeWarble(finish="length"), "did not end by itself"),
        (FakeWarble(frames=2), "should last"),
        (FakeWarble(frames=0), "should last"),
        (FakeWarble(frames=400), "should last"),
        (FakeWarble(level=0.0), "no speech"),
        (FakeWarble(level=float("nan")), "no speech"),
    ],
)
def test_sick_speech_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    warble: FakeWarble,
    words: str,
) -> None:
    speaks(monkeypatch, warble)
    assert cli.main(["doctor"]) == 1
    out = capfd.readouterr().out
    assert f"problem: {words}" in out or (words in out and "problem: " in out)
    assert out.splitlines()[-1].split(maxsplit=1)[1] in ("1 problem", "2 problems")


def test_another_code_is_a_problem_in_float32_only() -> None:
    speech = FakeWarble().say("", greedy=True, seed=0)
    assert doctor.check_codes(speech, "float32").state == "good"
    speech.codes[9, -1] += 1
    wrong = doctor.check_codes(speech, "float32")
    assert (wrong.name, wrong.state) == ("golden codes", "problem")
    assert doctor.check_codes(speech, "bfloat16").found.startswith("not compared")


def test_the_golden_codes_are_the_reference_engines() -> None:
    pytest.importorskip("torch")
    from reference.dump import open_engine
    from reference.golden_bundled import doctor_sentence

    assert json.loads(doctor.SELF_TEST.read_text()) == doctor_sentence(
        open_engine(doctor.SELF_TEST.parent), doctor.SELF_TEST.parent
    )


@pytest.mark.parametrize(("free", "states"), [(1e9, ["good", "note"]), (9e9, ["good", "good"])])
def test_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, states: Any) -> None:
    monkeypatch.setenv("WARBLE_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(doctor.os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}.get)
    memory, disk = doctor.check_room()
    assert [memory.state, disk.state] == states
    assert ("WARBLE_CACHE" in disk.advice) == (free < 4e9)


def test_missing_bundled_model_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise CheckpointError("bundled has no config.json")

    monkeypatch.setitem(vars(warble_mlx), "load", load)
    check = found("self-test")
    assert (check.state, check.advice) == ("problem", "bundled has no config.json")


@pytest.mark.usefixtures("healthy")
def test_clashing_wheels_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    monkeypatch.setattr(backend, "wheels", lambda: both)
    check = found("mlx wheels")
    assert check.state == "problem"
    assert "pip uninstall -y mlx-cpu mlx-cuda-13" in check.advice


def test_mlx_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> None:
        raise backend.PlatformError("MLX needs a Mac with Apple silicon")

    monkeypatch.setattr(backend, "prepare", prepare)
    (check,) = doctor.check_mlx()
    assert (check.state, check.advice) == ("problem", "MLX needs a Mac with Apple silicon")


@pytest.mark.parametrize(
    ("blas", "on_gpu", "state", "words"),
    [
        (backend.Blas("not needed"), True, "good", "Accelerate"),
        (backend.Blas("loaded", "/lib/libopenblas.so.0"), False, "good", "libopenblas.so.0"),
        (backend.Blas("already there", "/lib/libmkl.so"), False, "good", "libmkl.so"),
        (backend.Blas("absent", hint=backend.OPENBLAS_HINT), False, "note", "libopenblas0"),
        (backend.Blas("absent", hint=backend.OPENBLAS_HINT), True, "good", "absent"),
        (backend.Blas("too late", hint="import it first"), False, "note", "import it first"),
    ],
)
def test_blas(blas: backend.Blas, on_gpu: bool, state: str, words: str) -> None:
    check = doctor.check_blas(blas, on_gpu=on_gpu)
    assert check.state == state
    assert words in check.found + check.advice


def test_absent_extras_give_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "absent")
    checks = list(doctor.check_extras())
    assert [check.name for check in checks] == [f"extra {name}" for name in doctor.EXTRAS]
    assert {check.state for check in checks} == {"note"}
    assert checks[0].found == "sounddevice is not installed"
    assert checks[0].advice == 'for playing speech: pip install "warble-mlx[play]"'


def test_every_extra_is_looked_at() -> None:
    listed = set(metadata.metadata("warble-mlx").get_all("Provides-Extra") or ())
    # What the tests need; and a build of MLX, which has lines of its own.
    assert listed - {"dev", "cuda13"} == set(doctor.EXTRAS)


def test_an_extra_is_there_if_all_that_it_needs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"coremltools": "9.0", "torch": "2.13.0+cpu", "numpy": "2.3.5"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "absent"))

    def ios() -> doctor.Check:
        return next(check for check in doctor.check_extras() if check.name == "extra ios")

    assert ios() == doctor.Check("extra ios", "coremltools 9.0, torch 2.13.0+cpu, numpy 2.3.5")
    versions["numpy"] = "2.4.1"
    del versions["torch"]
    assert ios().found == "torch is not installed, numpy 2.4.1 is not <2.4"
    assert ios().advice == 'for Core ML packages (warble export-ios): pip install "warble-mlx[ios]"'


def test_a_server_needs_more_than_one_package() -> None:
    names = [needed.name for needed in doctor.requirements("server")]
    assert names == ["starlette", "uvicorn", "python-multipart", "prometheus-client"]


@pytest.mark.parametrize("lacking", [None, "playing needs PortAudio"])
def test_loudspeaker(monkeypatch: pytest.MonkeyPatch, lacking: str | None) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.5.6")
    monkeypatch.setattr(player, "why_mute", lambda: lacking)
    last = list(doctor.check_extras())[-1]
    assert (last.name, last.state) == ("loudspeaker", "note" if lacking else "good")
    assert (lacking or "") in last.advice


@pytest.mark.parametrize(
    ("version", "states"),
    [("absent", []), ("4.57.5", ["good"]), ("5.0.0", ["note"]), ("10.1", ["note"])],
)
def test_transformers_five_is_warned_about(version: str, states: list[str]) -> None:
    assert [check.state for check in doctor.check_transformers(version)] == states


def test_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("WARBLE_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check = doctor.check_cache()
    assert str(tmp_path) in check.found
    assert "HF_HUB_OFFLINE" in check.found
