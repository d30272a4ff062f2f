"""`warble verify`: what passes, what counts as a tie, what is not compared.

The dump is the PyTorch reference engine's, of the small synthetic checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import msgspec
import numpy as np
import pytest
import synthetic
from verifying import DUMP, RUNGS, converted, failed, greedy, outcomes

from warble_mlx.backend import on_gpu
from warble_mlx.cli import main
from warble_mlx.engine import Engine
from warble_mlx.errors import CheckpointError
from warble_mlx.verify.climb import climb, climb_alone, limits_for, verify
from warble_mlx.verify.compare import BFLOAT16, EXACT, difference, race_margins, values
from warble_mlx.verify.dump import Dump, read_dump, write_dump
from warble_mlx.verify.self_check import SelfRungs
from warble_mlx.verify.subject import Subject, load_subject


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_source(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture
def subject(bundle: Path) -> Subject:
    return load_subject(bundle, "float32")


@pytest.fixture(scope="module")
def dump() -> Dump:
    return read_dump(DUMP)


# ---------------------------------------------------------------- what passes


def test_values_that_are_no_numbers_are_called_so() -> None:
    """Also of a bundle that is held against itself, where no dump has anything."""
    spoilt = np.full((2, 3), np.nan, np.float32)
    found = values("x", spoilt, spoilt, 1e-5, relative=False, axes="a, b")
    assert found.state == "failed"
    assert found.message.startswith("nan at (a, b) [0, 0]: the weights are damaged")


def test_a_faithful_bundle_passes_every_rung(
    bundle: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "report.json"
    assert main(["verify", str(bundle), "--against", str(DUMP), "--json", str(out)]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert text.splitlines()[-1].startswith("PASSED: the same model in float32")
    report = json.loads(out.read_bytes())
    assert [o["rung"] for o in report["outcomes"]] == RUNGS
    assert {o["state"] for o in report["outcomes"]} == {"passed"}
    assert report["passed"] is True
    assert report["ties"] == 0
    assert report["limits"] == "float32"
    assert report["against"]["versions"]["torch"]
    assert report["against"]["checkpoint"].keys() >= {"model.safetensors", "codec.safetensors"}
    assert report["tf32"] is False
    compared = {o["rung"]: o["compared"] for o in report["outcomes"]}
    assert compared["greedy codes"] == 24
    assert compared["sampled codes"] == 24
    assert all(compared.values())


def test_json_alone_on_stdout(bundle: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["verify", str(bundle), "--against", str(DUMP), "--json", "-"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["schema"] == "warble-verify-1"


def test_rows_generated_together(subject: Subject, dump: Dump) -> None:
    found = list(climb(subject, dump, EXACT, rows=2))
    assert not failed(found)


def test_a_codec_stored_in_16_bits_is_compared_by_its_error(source: Path, tmp_path: Path) -> None:
    report = verify(converted(source, tmp_path / "short", "float16"), DUMP)
    assert report.codec_limits == "rounded"
    assert "its codec within the rounding to float16" in report.verdict
    assert not failed(report.outcomes)
    wave = next(o for o in report.outcomes if o.rung == "waveform")
    assert wave.worst is not None
    assert 1e-5 < wave.worst < 0.02


def test_a_published_checkpoint_without_a_codec(source: Path, dump: Dump) -> None:
    """The transformers of a source folder can be held against a dump as they are."""
    found = outcomes(load_subject(source, "float32"), dump)
    assert [o.rung for o in found] == RUNGS[:10]
    assert not failed(found)


def test_a_self_check_needs_no_dump(
    bundle: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["verify", str(bundle)]) == 0
    said = capsysbinary.readouterr().out.decode().splitlines()
    compiled = ["compiled step"] if on_gpu() else []
    assert [line.split("  ")[1].strip() for line in said[:-1]] == [
        "rope closed form", "cached steps", *compiled, "waveform streamed",
    ]  # fmt: skip
    assert "only a dump of the source (--against) shows" in said[-1]


# ---------------------------------------------------------------- ties


def tied(dump: Dump, margin: float) -> tuple[Dump, int, int]:
    """The dump as if at frame 3 book 5 two scores had been `margin` apart and the other one had
    been chosen. Everything behind it is then not what the model says."""
    name, frame, book = "plain", 3, 5
    tensors = dict(dump.tensors)
    scores = tensors[f"{name}.fast_logits"].copy()
    codes = tensors[f"{name}.codes"].copy()
    row = scores[frame, book - 1]
    second = int(np.argsort(-row)[1])
    row[second] = row.max() + margin
    codes[book, frame] = second
    tensors |= {f"{name}.fast_logits": scores, f"{name}.codes": codes}
    return Dump(dump.info, tensors), frame, second


def test_a_tie_is_counted_and_the_rest_is_compared(subject: Subject, dump: Dump) -> None:
    """What follows the tie is not the model's continuation, so only the tie itself may pass."""
    made, _, _ = tied(dump, 1e-6)
    cut = cut_behind(made, 4)
    found = greedy(subject, cut)
    assert found.state == "passed"
    assert found.ties == 1
    assert found.agreement == pytest.approx(1 - 1 / 4)
    behind = greedy(subject, made)
    assert behind.state == "failed"
    assert behind.ties == 1
    assert "first differing frame 4" in behind.message


def test_a_clear_difference_is_no_tie(subject: Subject, dump: Dump) -> None:
    made, frame, second = tied(dump, 1e-3)
    found = greedy(subject, made)
    assert found.state == "failed"
    assert found.ties == 0
    assert f"first differing frame {frame}" in found.message
    assert f"instead of {second}" in found.message


def cut_behind(dump: Dump, frames: int) -> Dump:
    """Only the first frames of the plain case."""
    tensors = dict(dump.tensors)
    tensors["plain.codes"] = tensors["plain.codes"][:, :frames]
    for name in ("normed", "semantic_logits", "fast_logits"):
        tensors[f"plain.{name}"] = tensors[f"plain.{name}"][:frames]
    info = msgspec.structs.replace(dump.info, cases=dump.info.cases[:1])
    return Dump(info, tensors)


def test_margins_of_a_race() -> None:
    logits = np.array([1.0, 1.0, -9.0], np.float32)
    assert race_margins(logits, np.array([0.5, 0.5, 0.9]), 50, 1.0, 1.0)[:2].tolist() == [0, 0]
    margins = race_margins(logits, np.array([0.9, 0.1, 0.9]), 50, 1.0, 1.0)
    assert margins[0] == 0
    assert 0.9 < margins[1] < 1
    # Removed by the filter: by far, and at its very border.
    assert race_margins(logits, np.array([0.9, 0.1, 1 - 1e-9]), 50, 0.6, 1.0)[2] == 1
    drawn = np.array([0.1, 0.2, 0.9])
    border = race_margins(np.array([1.0, 1.0, 1.0 - 1e-5], np.float32), drawn, 2, 2.0, 1.0)
    assert border[1] == 0
    assert border[2] == 0
    assert 0 < border[0] < 1
    clear = race_margins(np.array([1.0, 1.0, 0.99], np.float32), drawn, 2, 2.0, 1.0)
    assert clear[1] == 0
    assert clear[2] == 1
    # The last candidate allowed is no tie's loser, however near the next rank lies in time.
    last = race_margins(np.array([1.0, 0.5, 0.4], np.float32), drawn[[1, 2, 0]], 2, 2.0, 1.0)
    assert last[1] == 0
    assert last[0] > 0.5


def test_errors_are_measured() -> None:
    got, wanted = np.array([1.0, 22.0]), np.array([1.0, 20.0])
    assert difference(got, wanted, relative=False).worst == pytest.approx(0.1)
    assert difference(got, wanted, relative=False).where == (1,)
    assert difference(got / 100, wanted / 100, relative=False).worst == pytest.approx(0.02)
    assert difference(got, wanted, relative=True).worst == pytest.approx(2 / np.sqrt(401), 1e-3)
    assert difference(np.array([np.nan, 1.0]), wanted, relative=True).worst == np.inf


# ---------------------------------------------------------------- what is not compared


def test_another_model_is_refused_by_its_dimensions(subject: Subject, dump: Dump) -> None:
    config = msgspec.structs.replace(dump.info.config, n_layer=3, rope_base=10000.0)
    info = msgspec.structs.replace(dump.info, config=config)
    with pytest.raises(CheckpointError, match=r"n_layer 2 \(dump: 3\), rope_base 1000000"):
        list(climb(subject, Dump(info, dump.tensors), EXACT))


def test_files_that_are_no_dumps(bundle: Path, tmp_path: Path, dump: Dump) -> None:
    with pytest.raises(CheckpointError, match="there is no dump"):
        verify(bundle, tmp_path / "absent")
    with pytest.raises(CheckpointError, match="but no dump of an engine"):
        verify(bundle, bundle / "model.safetensors")
    older = msgspec.structs.replace(dump.info, format="warble-dump-0")
    write_dump(tmp_path / "older", Dump(older, dump.tensors))
    with pytest.raises(CheckpointError, match="format warble-dump-0"):
        verify(bundle, tmp_path / "older")
    lacking = {n: t for n, t in dump.tensors.items() if n != "plain.normed"}
    write_dump(tmp_path / "lacking", Dump(dump.info, lacking))
    with pytest.raises(CheckpointError, match=r"lacks plain\.normed"):
        verify(bundle, tmp_path / "lacking")


def test_a_dump_can_be_written_and_read(tmp_path: Path, dump: Dump) -> None:
    write_dump(tmp_path / "again", dump)
    again = read_dump(tmp_path / "again")
    assert again.info == dump.info
    assert again.tensors.keys() == dump.tensors.keys()
    assert all(np.array_equal(again[n], t) for n, t in dump.tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


def test_bfloat16_is_judged_by_agreement(bundle: Path, dump: Dump) -> None:
    half = load_subject(bundle, "bfloat16")
    info = msgspec.structs.replace(dump.info, dtype="bfloat16")
    found = {o.rung: o for o in outcomes(half, Dump(info, dump.tensors))}
    codes = found["greedy codes"]
    assert codes.state == "passed"
    assert codes.agreement is not None
    assert 0.8 <= codes.agreement <= 1
    assert "equal from the start in a free run: plain" in codes.message
    assert found["sampled codes"].state == "skipped"
    half.model.layers.reverse()
    assert failed(outcomes(half, Dump(info, dump.tensors)))[:1] == ["layer 0"]


def test_a_quantised_bundle_against_its_source(subject: Subject, dump: Dump) -> None:
    """8 bits pass within what quantisation explains; a swapped layer does not."""
    for block in [*subject.model.layers, *subject.model.fast_layers]:
        nn.quantize(block, group_size=32, bits=8)
    rounded = msgspec.structs.replace(dump.info, packed=True)
    assert limits_for(subject, rounded).strength == "quantised"
    found = outcomes(subject, Dump(rounded, dump.tensors))
    assert not failed(found)
    subject.model.layers.reverse()
    assert failed(outcomes(subject, Dump(rounded, dump.tensors)))[:1] == ["layer 0"]


@pytest.mark.parametrize(
    ("do", "rung"),
    [
        (lambda s: setattr(s.model, "_slow_rope", s.model._slow_rope * 0), "rope closed form"),
        (lambda s: setattr(s.model.layers[0].attention_norm, "eps", 0.1), None),
    ],
)
def test_what_a_self_check_sees(subject: Subject, do: Any, rung: str | None) -> None:
    do(subject)
    assert failed(list(climb_alone(subject)))[:1] == ([rung] if rung else [])


def with_step_of(subject: Subject, other: Subject) -> Subject:
    """`subject` as if its compiled step were the plain one of another model."""
    return replace(subject, engine=Engine(other.model, compiled=False), compiled=True)


def test_a_self_check_compares_the_compiled_step(subject: Subject, bundle: Path) -> None:
    found = {o.rung: o for o in climb_alone(with_step_of(subject, subject))}
    assert found["compiled step"].state == "passed"
    other = load_subject(bundle, "float32")
    other.model.fast_layers.reverse()
    (wrong,) = SelfRungs(with_step_of(subject, other), EXACT).compiled()
    assert wrong.state == "failed"


def test_a_self_check_in_bfloat16_tells_the_share(bundle: Path) -> None:
    half = load_subject(bundle, "bfloat16")
    (same,) = SelfRungs(with_step_of(half, half), BFLOAT16).compiled()
    assert (same.state, same.agreement) == ("passed", 1.0)
    assert same.message == "100.0% of the codes are equal"


def test_a_self_check_needs_neither_frames_nor_a_tokenizer(subject: Subject) -> None:
    bare = SelfRungs(replace(subject, prompts=None), EXACT)
    assert [o.state for o in bare.streamed()] == ["skipped"]  # nothing was generated yet
    assert [o.state for o in bare.cached()] == ["passed"]
    assert [o.state for o in bare.streamed()] == ["passed"]
