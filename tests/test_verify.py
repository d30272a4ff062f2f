"""`warble verify`: a right bundle passes, a broken one fails at the part that is broken.

The dump is the PyTorch reference engine's, of the small synthetic checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
import synthetic
from golden_data import FOLDER

import warble_mlx.engine
import warble_mlx.layers
import warble_mlx.sampling
from warble_mlx.cli import main
from warble_mlx.codec import CodecDecoder
from warble_mlx.codec.convolution import CausalTransposedConv
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine, State
from warble_mlx.errors import CheckpointError
from warble_mlx.verify.climb import climb, climb_alone, limits_for, verify
from warble_mlx.verify.compare import EXACT, Outcome, difference, race_margins, values
from warble_mlx.verify.dump import Dump, read_dump, write_dump
from warble_mlx.verify.subject import Subject, load_subject

DUMP = FOLDER / "dump_small.safetensors"
RUNGS = [
    "prompt", "rope", "embedding", "layer 0", "layer 1", "final hidden", "semantic logits",
    "fast logits", "greedy codes", "sampled codes", "codec rope", "codec dequantised",
    "codec latents", "waveform", "waveform streamed", "codec codes",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_source(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("small") / "bundle")


def converted(source: Path, out: Path, codec_dtype: str = "float32") -> Path:
    from warble_mlx.convert import convert

    convert(source, out, codec_dtype=codec_dtype)
    return out


@pytest.fixture
def subject(bundle: Path) -> Subject:
    return load_subject(bundle, "float32")


@pytest.fixture(scope="module")
def dump() -> Dump:
    return read_dump(DUMP)


def outcomes(subject: Subject, dump: Dump) -> list[Outcome]:
    return list(climb(subject, dump, limits_for(subject, dump.info)))


def failed(found: list[Outcome]) -> list[str]:
    return [o.rung for o in found if o.state == "failed"]


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
    assert [line.split("  ")[1].strip() for line in said[:-1]] == [
        "rope closed form", "cached steps", "waveform streamed",
    ]  # fmt: skip
    assert "only a dump of the source (--against) shows" in said[-1]


# ---------------------------------------------------------------- what fails, and where

Break = Callable[[Subject, pytest.MonkeyPatch], object]


def swap_layers(s: Subject, _: Any) -> None:
    s.model.layers.reverse()


def perturb(s: Subject, _: Any) -> None:
    weight = s.model.layers[1].feed_forward.w2.weight
    s.model.layers[1].feed_forward.w2.weight = weight * 1.001


def unrounded_table(s: Subject, _: Any) -> None:
    table = s.model._slow_rope
    s.model._slow_rope = table + 1e-4 * (table != 1) * (table != 0)


def half_rotation(_: Subject, patch: pytest.MonkeyPatch) -> None:
    rotate = warble_mlx.layers.rotate

    def halves(x: mx.array, factors: tuple[mx.array, mx.array]) -> mx.array:
        half = x.reshape(*x.shape[:-2], 2, x.shape[-2]).swapaxes(-1, -2)
        return rotate(half, factors).swapaxes(-1, -2).reshape(x.shape)

    patch.setattr(warble_mlx.layers, "rotate", halves)


def wrong_epsilon(s: Subject, _: Any) -> None:
    s.model.layers[0].attention_norm.eps = 1e-5


def missing_bias(s: Subject, _: Any) -> None:
    linear = s.model.layers[1].attention.wqkv
    linear.bias = mx.zeros(linear.bias.shape)


def swapped_heads(s: Subject, _: Any) -> None:
    linear, h = s.model.layers[1].attention.wqkv, s.config.head_dim
    for name in ("weight", "bias"):
        first, second, *rest = mx.split(linear[name], linear[name].shape[0] // h)
        linear[name] = mx.concatenate([second, first, *rest])


def swapped_gates(s: Subject, _: Any) -> None:
    linear = s.model.layers[0].feed_forward.w13
    linear.weight = mx.concatenate(mx.split(linear.weight, 2)[::-1])


def swapped_codebooks(s: Subject, _: Any) -> None:
    table = s.model.codebook_embeddings
    books = mx.split(table.weight, 10)
    table.weight = mx.concatenate([*books[:3], books[4], books[3], *books[5:]])


def final_norm(s: Subject, _: Any) -> None:
    s.model.norm.weight = s.model.norm.weight * 1.001


def wrong_eos_row(s: Subject, _: Any) -> None:
    s.model._head = mx.concatenate([s.model._head[:-1], s.model._head[:1]])


def fast_layers(s: Subject, _: Any) -> None:
    s.model.fast_layers.reverse()


def stale_hidden(_: Subject, patch: pytest.MonkeyPatch) -> None:
    """While speaking, the fast AR is given the step before's state."""
    entry, before = DualAR.fast_input, list[mx.array]()

    def stale(self: DualAR, hidden: mx.array) -> mx.array:
        if hidden.shape[0] == 1:
            before.append(hidden)
            hidden = before[-2] if len(before) > 1 else hidden
        return entry(self, hidden)

    patch.setattr(DualAR, "fast_input", stale)


def padding_seen(_: Subject, patch: pytest.MonkeyPatch) -> None:
    prefill = Engine.prefill

    def without_hole(self: Engine, prompt: Any) -> State:
        state = prefill(self, prompt)
        return state._replace(hole=mx.zeros_like(state.hole))

    patch.setattr(Engine, "prefill", without_hole)


def crossing_kept(_: Subject, patch: pytest.MonkeyPatch) -> None:
    kept = warble_mlx.sampling.kept

    def more(ranking: Any, top_k: mx.array, top_p: mx.array) -> mx.array:
        own = mx.softmax(ranking.scores, axis=-1)
        return kept(ranking._replace(mass=ranking.mass - own), top_k, top_p)

    patch.setattr(warble_mlx.sampling, "kept", more)


def first_recorded(_: Subject, patch: pytest.MonkeyPatch) -> None:
    remember = warble_mlx.sampling.remember

    def all_of_them(recent: mx.array, chosen: mx.array, frame: mx.array) -> mx.array:
        return remember(recent, chosen, frame + 1)

    patch.setattr(warble_mlx.engine, "remember", all_of_them)


def swapped_books(s: Subject, _: Any) -> None:
    books = s.decoder.quantizer.quantizer.quantizers
    books[2], books[3] = books[3], books[2]


def post_module_window(s: Subject, _: Any) -> None:
    s.decoder.quantizer.post_module.window -= 1


def channel_order(s: Subject, _: Any) -> None:
    conv = s.decoder.decoder.model[0].conv
    conv.weight = conv.weight[:, :, ::-1]


def kernel_order(s: Subject, _: Any) -> None:
    layer = s.decoder.decoder.model[2].block[1]
    assert isinstance(layer, CausalTransposedConv)
    layer.conv.weight = layer.conv.weight[:, ::-1]


def forgetful_stream(_: Subject, patch: pytest.MonkeyPatch) -> None:
    """The window transformer forgets its position between chunks of less than eight frames."""
    step = CodecDecoder.step

    def forgets(self: CodecDecoder, codes: mx.array, state: Any) -> Any:
        if codes.shape[2] < 8:
            state = tuple(mx.zeros_like(a) if a.dtype == mx.int32 else a for a in state)
        return step(self, codes, state)

    patch.setattr(CodecDecoder, "step", forgets)
    patch.setattr("warble_mlx.codec.decoder.chunk_frames_for", lambda *_: 12)


def encoder_projection(s: Subject, _: Any) -> None:
    search = s.encoder.quantizer.searches()[4].in_proj
    search.weight = search.weight[::-1]


BREAKS: list[tuple[Break, str]] = [
    (swap_layers, "layer 0"),
    (perturb, "layer 1"),
    (unrounded_table, "rope"),
    (half_rotation, "layer 0"),
    (wrong_epsilon, "layer 0"),
    (missing_bias, "layer 1"),
    (swapped_heads, "layer 1"),
    (swapped_gates, "layer 0"),
    (swapped_codebooks, "embedding"),
    (final_norm, "final hidden"),
    (wrong_eos_row, "semantic logits"),
    (fast_layers, "fast logits"),
    (stale_hidden, "greedy codes"),
    (padding_seen, "greedy codes"),
    (crossing_kept, "sampled codes"),
    (first_recorded, "sampled codes"),
    (swapped_books, "codec dequantised"),
    (post_module_window, "codec latents"),
    (channel_order, "waveform"),
    (kernel_order, "waveform"),
    (forgetful_stream, "waveform streamed"),
    (encoder_projection, "codec codes"),
]


@pytest.mark.parametrize(("do", "rung"), BREAKS, ids=[do.__name__ for do, _ in BREAKS])
def test_the_ladder_stops_at_the_broken_part(
    subject: Subject, dump: Dump, monkeypatch: pytest.MonkeyPatch, do: Break, rung: str
) -> None:
    do(subject, monkeypatch)
    found = outcomes(subject, dump)
    assert failed(found)[:1] == [rung]
    assert next(o for o in found if o.state == "failed").message


def test_only_the_broken_layers_fail(subject: Subject, dump: Dump) -> None:
    """Behind a failed rung its ladder is skipped; the codec's is climbed all the same."""
    perturb(subject, None)
    found = {o.rung: o for o in outcomes(subject, dump)}
    assert failed(list(found.values())) == ["layer 1"]
    assert found["greedy codes"].state == "skipped"
    assert found["greedy codes"].message == "behind layer 1"
    assert found["waveform"].state == "passed"


def test_a_bundle_with_a_swapped_layer_is_refused_by_the_command(
    bundle: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    path = broken / "model.safetensors"
    weights = mx.load(str(path))
    mx.eval(list(weights.values()))
    for name in [n for n in weights if n.startswith("layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        weights[name], weights[other] = weights[other], weights[name]
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    assert main(["verify", str(broken), "--against", str(DUMP)]) == 1
    last = capsysbinary.readouterr().out.decode().splitlines()[-1]
    assert last.startswith("FAILED at layer 0: error ")
    assert "also failed: layer 1" in last


def test_a_failed_code_names_frame_rows_and_margin(subject: Subject, dump: Dump) -> None:
    subject.model.fast_layers.reverse()
    found = greedy(subject, dump)
    assert found.state == "failed"
    assert "plain: first differing frame 0: [" in found.message
    assert "the dump has [" in found.message
    assert "scores prefer its own by" in found.message
    assert found.worst is not None
    assert found.worst > 1e-4


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


def greedy(subject: Subject, dump: Dump) -> Outcome:
    from warble_mlx.verify.choices import ChoiceRungs
    from warble_mlx.verify.passes import Passes

    info = msgspec.structs.replace(dump.info, cases=dump.info.cases[:1])
    rungs = ChoiceRungs(Passes(subject, Dump(info, dump.tensors)), EXACT)
    (found,) = rungs.greedy_codes()
    return found


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


def test_a_self_check_sees_a_broken_cache(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding_seen(subject, monkeypatch)
    assert failed(list(climb_alone(subject))) == ["cached steps"]
