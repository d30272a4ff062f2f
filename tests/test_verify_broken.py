"""`warble verify` on models that are broken in one place: it fails there, and not elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import synthetic
from verifying import DUMP, converted, failed, greedy, outcomes

import warble_mlx.engine
import warble_mlx.layers
import warble_mlx.sampling
from warble_mlx.cli import main
from warble_mlx.codec import CodecDecoder
from warble_mlx.codec.convolution import CausalTransposedConv
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine, State
from warble_mlx.verify.climb import climb_alone
from warble_mlx.verify.dump import Dump, read_dump
from warble_mlx.verify.subject import Subject, load_subject


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return converted(synthetic.write_source(folder / "source"), folder / "bundle")


@pytest.fixture
def subject(bundle: Path) -> Subject:
    """Its step is plain on a GPU too: what a break keeps of a compiled one belongs to its trace."""
    loaded = load_subject(bundle, "float32")
    return replace(loaded, engine=Engine(loaded.model, compiled=False), compiled=False)


@pytest.fixture(scope="module")
def dump() -> Dump:
    return read_dump(DUMP)


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


def test_a_self_check_sees_a_broken_cache(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding_seen(subject, monkeypatch)
    assert failed(list(climb_alone(subject))) == ["cached steps"]
