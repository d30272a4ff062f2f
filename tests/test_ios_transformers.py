"""The Core ML packages of the transformers against the runtime, and what has to fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the extra ios is not installed")
pytest.importorskip("coremltools", reason="the extra ios is not installed")

import ios_data  # noqa: E402
import mlx.core as mx  # noqa: E402
import msgspec  # noqa: E402
from coremltools import target  # noqa: E402
from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

from warble_mlx.bench.synthetic import TINY, random_dual_ar  # noqa: E402
from warble_mlx.ios_export.checks import decibels  # noqa: E402
from warble_mlx.ios_export.coreml_codec import range_check  # noqa: E402
from warble_mlx.ios_export.coreml_convert import write_program  # noqa: E402
from warble_mlx.ios_export.coreml_static import functions_of  # noqa: E402
from warble_mlx.ios_export.coreml_transformers import (  # noqa: E402
    FAST_AR,
    SLOW_AR,
    FastAR,
    Frames,
    Outputs,
    SlowAR,
    best_check,
    fast_checks,
    fast_frames,
    replay_checks,
    slow_checks,
    transformer_checks,
    weight_checks,
    write_transformers,
)
from warble_mlx.ios_export.drive import uniforms  # noqa: E402
from warble_mlx.ios_export.exporter import export  # noqa: E402
from warble_mlx.ios_export.job import Job, Options  # noqa: E402
from warble_mlx.ios_export.manifest import write_manifest  # noqa: E402
from warble_mlx.ios_export.mil_eval import Program  # noqa: E402
from warble_mlx.ios_export.mil_transformer import (  # noqa: E402
    Draw,
    Matrix,
    fast_program,
    slow_program,
)
from warble_mlx.ios_export.mil_weights import Grid, Store  # noqa: E402
from warble_mlx.ios_export.taught import (  # noqa: E402
    Taught,
    read_selftest,
    teach,
    teacher,
    write_selftest,
)
from warble_mlx.ios_export.verify import verify_export  # noqa: E402
from warble_mlx.prompt import Prompt  # noqa: E402
from warble_mlx.sampling import (  # noqa: E402
    NOTHING,
    Settings,
    choose_code,
    choose_semantic,
    remember,
)
from warble_mlx.weights import MODEL_FILE  # noqa: E402

Scores = npt.NDArray[np.float32]
FRAMES = 8
SEED = 7


@pytest.fixture(scope="module", autouse=True)
def away() -> Iterator[None]:
    """The converter's libraries warn of each other's age."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The bundled model in 4 bits."""
    folder = tmp_path_factory.mktemp("bundle") / "q4"
    return ios_data.job_on(ios_data.four_bit_bundle(folder))


@pytest.fixture(scope="module")
def taught(job: Job) -> Taught:
    return teach(teacher(job), job.prompt("Hello there."), FRAMES, SEED)


@pytest.fixture(scope="module")
def folder(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("coreml")
    write_transformers(job, found)
    return found


def results(checks: Iterator[object] | list[object]) -> dict[str, str]:
    return {check.name: check.result for check in checks}  # type: ignore[attr-defined]


def first(taught: Taught, frames: int) -> Taught:
    """The same with fewer frames."""
    return taught._replace(
        codes=taught.codes[:, :frames],
        hidden=taught.hidden[:frames],
        semantic=taught.semantic[:frames],
        books=taught.books[:frames],
    )


# ---------------------------------------------------------------------- against the runtime


def test_both_packages_equal_the_runtime(job: Job, folder: Path, taught: Taught) -> None:
    found = {c.name: c for c in transformer_checks(job, folder, taught)}
    assert [c.name for c in found.values() if c.result != "pass"] == []
    for name in ("hidden states of slow_ar", "scores of slow_ar", "scores of fast_ar"):
        value = found[name].value
        assert value is not None
        assert value > 52
    assert found["unpacked values against the bundle's"].value > 0
    drawn = found["drawn codes that are not the runtime's"]
    assert drawn.limit == 3
    assert int(drawn.unit.removeprefix("of ")) > 6 * FRAMES
    assert sorted(p.name for p in folder.iterdir()) == [
        "embeddings.safetensors", FAST_AR, SLOW_AR,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_hundred_frames_of_speech(job: Job, folder: Path) -> None:
    """Past position 256, through both prefill lengths."""
    taught = teach(teacher(job), job.prompt(job.check_text), 110, SEED)
    assert taught.prompt.shape[1] > 160
    assert taught.codes.shape[1] >= 100
    found = {c.name: c for c in replay_checks(job.config, folder, taught)}
    for check in found.values():
        print(check.name, check.value, check.unit, check.note)
    assert [c.name for c in found.values() if c.result != "pass"] == []


def test_the_packages_speak_the_runtime_s_codes(job: Job, folder: Path, taught: Taught) -> None:
    """Given the prompt alone; the semantic token chosen by the host, the others in the graph."""
    c, slow = job.config, SlowAR(folder, job.config)
    fast = FastAR(folder, c, taught.sampling, SEED)
    regular = Settings(mx.array([50]), mx.array([0.9]), mx.array([0.7]))
    rescue = Settings(mx.array([50]), mx.array([c.ras_top_p]), mx.array([c.ras_temperature]))
    recent = mx.full((1, c.ras_window_size), NOTHING, dtype=mx.uint32)
    given, spoken = slow.read(taught.prompt), []
    for number in range(FRAMES):
        drawn, _ = uniforms(c, SEED, number)
        chosen = choose_semantic(mx.array(given.scores), regular, rescue, drawn, recent)
        recent = remember(recent, chosen, mx.array([number]))
        codes, _ = fast.frame(number, given.hidden[0], int(chosen.item()))
        spoken.append(codes)
        given = slow.step(codes)
    same = (np.stack(spoken, axis=1) == taught.codes).all(axis=0)
    leading = int(same.cumprod().sum())
    print(f"{leading} of {FRAMES} frames before the first draw that nearly ties")
    assert leading >= 3


def test_functions_are_described(job: Job, folder: Path) -> None:
    c = job.config
    slow = {f.name: f for f in functions_of(folder / SLOW_AR, {"step": "one"})}
    assert set(slow) == {"prefill_32", "prefill_128", "step"}
    cache = (c.n_layer, c.n_local_heads, 1024, c.head_dim)
    for name, length in (("prefill_32", 32), ("prefill_128", 128), ("step", 1)):
        f = slow[name]
        assert [(t.name, t.shape, t.dtype) for t in f.inputs] == [
            ("embedded", (1, length, c.dim), "float16"),
            ("slot", (1,), "int32"),
            ("hole", (2,), "int32"),
        ]
        assert [(t.name, t.shape, t.dtype) for t in f.outputs] == [
            ("hidden", (1, c.dim), "float16"),
            ("logits", (1, c.head_rows), "float16"),
        ]
        assert [(t.name, t.shape, t.dtype) for s in f.states for t in s.tensors] == [
            ("keys", cache, "float16"),
            ("values", cache, "float16"),
        ]
    (fast,) = functions_of(folder / FAST_AR, {})
    assert [(t.name, t.dtype) for t in fast.inputs] == [
        ("hidden", "float16"), ("code", "int32"), ("noise", "float32"), ("top_k", "int32"),
        ("top_p", "float32"), ("temperature", "float32"),
    ]  # fmt: skip
    assert [(t.name, t.shape, t.dtype) for t in fast.outputs] == [("codes", (10,), "int32")]
    assert fast.states == ()


def test_functions_share_one_copy_of_packed_weights(job: Job, folder: Path) -> None:
    stored = sum(
        entry.nbytes
        for name, entry in Store(job.bundle, job.raw_config).header.entries.items()
        if name.startswith(("layers.", "norm."))
    )
    head = job.config.head_rows * job.config.dim * 2
    weights = folder / SLOW_AR / "Data/com.apple.CoreML/weights/weight.bin"
    assert weights.stat().st_size < stored + head + 500_000


def test_a_self_test_can_be_kept(job: Job, folder: Path, taught: Taught, tmp_path: Path) -> None:
    write_selftest(tmp_path, taught)
    kept = read_selftest(tmp_path)
    assert kept.codes.shape == (10, 4)
    assert kept.sampling == taught.sampling
    assert set(results(replay_checks(job.config, folder, kept)).values()) == {"pass"}


# ---------------------------------------------------------------------- controls


@pytest.mark.parametrize("error", [1, -1])
def test_a_shifted_slot_fails(job: Job, folder: Path, taught: Taught, error: int) -> None:
    """One slot left out, or the last one written over."""
    slow = SlowAR(folder, job.config, slot_error=error)
    found = results(slow_checks(taught, slow.forced(taught.prompt, taught.codes)))
    assert found["hidden states of slow_ar"] == "fail"
    assert found["scores of slow_ar"] == "fail"


class Wrong(Store):
    """One layer is unpacked wrongly."""

    path = ""

    def grid(self, path: str) -> Grid:
        found = super().grid(path)
        return (
            found._replace(offsets=found.offsets + np.float16(0.5)) if path == self.path else found
        )


def test_a_wrongly_unpacked_layer_of_the_fast_ar_fails(
    job: Job, folder: Path, taught: Taught, tmp_path: Path
) -> None:
    wrong = Wrong(job.bundle, job.raw_config)
    wrong.path = "fast_layers.1.feed_forward.w2"
    shutil.copytree(folder / SLOW_AR, tmp_path / SLOW_AR)
    write_program(fast_program(job.config, wrong), tmp_path / FAST_AR)
    checks = list(weight_checks(job, tmp_path))
    assert {c.result for c in checks} == {"fail"}
    assert checks[0].note == "fast_layers_1_feed_forward_w2"
    found = results(fast_checks(taught, fast_frames(tmp_path, job.config, taught)))
    assert found["scores of fast_ar"] == "fail"


def test_a_wrongly_unpacked_layer_of_the_slow_ar_fails(
    job: Job, folder: Path, taught: Taught, tmp_path: Path
) -> None:
    wrong = Wrong(job.bundle, job.raw_config)
    wrong.path = "layers.5.attention.wo"
    write_program(slow_program(job.config, wrong, 1, 1024), tmp_path / "step.mlpackage")
    right, other = (
        Program(package, name)(
            embedded=torch.from_numpy(taught.hidden[None, :1]).half(),
            slot=torch.tensor([0], dtype=torch.int32),
            hole=torch.tensor([0, 0], dtype=torch.int32),
        )["logits"].float().numpy()
        for package, name in ((folder / SLOW_AR, "step"), (tmp_path / "step.mlpackage", None))
    )  # fmt: skip
    few = first(taught, 1)._replace(semantic=right, hidden=taught.hidden[:1])
    for scores, result in ((other, "fail"), (right, "pass")):
        found = results(slow_checks(few, Outputs(few.hidden, scores)))
        assert found["scores of slow_ar"] == result


def test_two_layers_in_each_other_s_place_fail(job: Job, folder: Path, tmp_path: Path) -> None:
    class Crossed(Store):
        def grid(self, path: str) -> Grid:
            return super().grid(path.replace(".w1", ".w3") if ".0." in path else path)

    shutil.copytree(folder / SLOW_AR, tmp_path / SLOW_AR)
    crossed = Crossed(job.bundle, job.raw_config)
    write_program(fast_program(job.config, crossed), tmp_path / FAST_AR)
    differing, _ = weight_checks(job, tmp_path)
    assert (differing.value, differing.note) == (1, "fast_layers_0_feed_forward_w1")


def test_a_constant_beyond_sixteen_bits_fails(job: Job, taught: Taught, tmp_path: Path) -> None:
    class Loud(Store):
        def plain(self, name: str) -> Scores:
            return super().plain(name) * (1e5 if name == "fast_norm.weight" else 1)

    write_program(fast_program(job.config, Loud(job.bundle, job.raw_config)), tmp_path / FAST_AR)
    check = range_check("x", fast_frames(tmp_path, job.config, first(taught, 1)).peaks)
    assert check.result == "fail"


def test_only_near_scores_count_as_a_tie() -> None:
    wanted = np.array([1.0, 0.99, 0.5], np.float32)
    near, far = np.array([0.9, 1.0, 0.0], np.float32), np.array([0.0, 0.1, 1.0], np.float32)
    tie = best_check("x", [(wanted, wanted), (near, wanted)])
    assert (tie.result, tie.note) == ("pass", "1 ties, the widest of 0.0100")
    assert best_check("x", [(far, wanted)]).result == "fail"


def test_codes_behind_another_code_are_not_compared(taught: Taught) -> None:
    """A frame counts up to and with its first code that differs."""
    codes, books = taught.codes.copy(), taught.books.copy()
    codes[3, 2] ^= 1
    books[2, 3:] = 99
    found = {c.name: c for c in fast_checks(taught, Frames(codes, books, {}))}
    drawn = found["drawn codes that are not the runtime's"]
    assert (drawn.value, drawn.unit) == (1, f"of {9 * FRAMES - 6}")
    assert found["scores of fast_ar"].result == "pass"
    codes[1] ^= 1
    found = {c.name: c for c in fast_checks(taught, Frames(codes, books, {}))}
    assert found["drawn codes that are not the runtime's"].result == "fail"


# ---------------------------------------------------------------------- the part as a whole


@pytest.mark.slow
def test_the_part_is_verified_again(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = export(job.bundle, out, only=["coreml"], options=Options(check_frames=8))
    (part,) = manifest.parts
    assert part.memory.mapped == (out / "coreml/embeddings.safetensors").stat().st_size
    assert {f.file for f in part.functions} == {
        f"coreml/{name}.mlpackage" for name in ("slow_ar", "fast_ar", "post_module", "vocoder")
    }
    assert "fail" not in results(list(verify_export(out))).values()

    def changed(result: str) -> None:
        write_manifest(out, msgspec.structs.replace(manifest, parts=(part_now,)))
        found = results(list(verify_export(out)))
        assert found["Core ML functions unlike the manifest"] == result

    longer = msgspec.structs.replace(part.functions[0], longest_axis=5)
    part_now = msgspec.structs.replace(part, functions=(longer, *part.functions[1:]))
    changed("fail")
    part_now = msgspec.structs.replace(part, functions=part.functions[1:])
    changed("fail")
    part_now = part
    changed("pass")


# ---------------------------------------------------------------------- what else there may be


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_qk_norm": True, "attention_o_bias": True, "norm_fastlayer_input": False},
        {"fast_dim": 64, "fast_n_head": 1, "fast_n_local_heads": 1, "fast_attention_qk_norm": True},
    ],
)
def test_other_geometries(tmp_path: Path, options: dict[str, object]) -> None:
    """In 16 bits, every tensor of a bundle in use."""
    config = msgspec.structs.replace(TINY, **options)
    model = random_dual_ar(config)
    stored = dict(ios_data.stored_tensors(model))
    for name in stored:
        if name.endswith(("_norm.weight", "o.bias")):  # neither one nor zero
            noise = mx.random.normal(stored[name].shape, key=mx.random.key(len(name)))
            stored[name] = (stored[name] + 0.3 * noise).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / MODEL_FILE), stored)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    job = ios_data.job_on(tmp_path)
    columns = np.zeros((11, 40), np.int32)
    columns[0] = np.arange(40)
    columns[:, 20:30] = np.random.default_rng(1).integers(0, 512, (11, 10))
    columns[0, 20:30] = columns[1, 20:30] + config.semantic_begin_id  # frames of a voice
    prompt = Prompt(columns[:, :8], columns[:, 8:])
    taught = teach(teacher(job), prompt, 3, SEED)
    write_transformers(job, tmp_path)
    found = {c.name: c for c in transformer_checks(job, tmp_path, taught)}
    assert [c.name for c in found.values() if c.result != "pass"] == []
    assert "unpacked values against the bundle's" not in found


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (4, 32), (6, 64), (8, 128)])
def test_other_packings(tmp_path: Path, bits: int, group: int) -> None:
    """A packed product with its bias, rows in another order, against MLX's."""
    weight = mx.random.normal((96, 256), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    bias = mx.random.normal((96,), key=mx.random.key(1))
    tensors = {"a.weight": packed, "a.scales": scales, "a.biases": biases, "a.bias": bias}
    mx.save_safetensors(str(tmp_path / MODEL_FILE), tensors)
    settings = {"bits": bits, "group_size": group, "mode": "affine"}
    store, order = Store(tmp_path, {"quantization": settings}), np.roll(np.arange(96), 5)

    def program(x: object) -> object:
        return mb.identity(x=Matrix(store, "a", "a.bias", order)(x), name="y")

    inputs = [mb.TensorSpec((1, 256), dtype=types.fp16)]
    written = mb.program(input_specs=inputs, opset_version=target.iOS18)(program)
    write_program(written, tmp_path / "a.mlpackage")
    x = np.random.default_rng(0).normal(0, 1, (1, 256)).astype(np.float16)
    found = Program(tmp_path / "a.mlpackage")(x=torch.from_numpy(x))["y"].float().numpy()
    plain = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
    wanted = np.array(mx.array(x).astype(mx.float32) @ plain.T + bias)[:, order]
    assert decibels(found, wanted) > 55


def test_a_draw_is_the_runtime_s(tmp_path: Path) -> None:
    """The same code from the same scores and uniforms, for all kinds of settings."""
    size = 200

    def program(logits: object, noise: object, top_k: object, top_p: object, t: object) -> object:
        return mb.identity(x=Draw(size, top_k, top_p, t)(logits, noise), name="code")

    inputs = [
        mb.TensorSpec((1, size), dtype=types.fp16),
        mb.TensorSpec((1, size), dtype=types.fp32),
        mb.TensorSpec((1,), dtype=types.int32),
        mb.TensorSpec((1,), dtype=types.fp32),
        mb.TensorSpec((1,), dtype=types.fp32),
    ]
    written = mb.program(input_specs=inputs, opset_version=target.iOS18)(program)
    write_program(written, tmp_path / "draw.mlpackage")
    draw = Program(tmp_path / "draw.mlpackage")
    rng = np.random.default_rng(0)
    chosen = []
    for top_k, top_p, temperature in [
        (50, 0.9, 0.7), (1, 0.9, 1.0), (50, 0.01, 1.0), (5, 1.0, 2.0), (64, 0.999, 0.0),
    ]:  # fmt: skip
        for _ in range(20):
            logits = rng.normal(0, 3, (1, size)).astype(np.float16)
            uniforms = rng.uniform(0, 1, (1, size)).astype(np.float32)
            uniforms[0, :3] = 0  # can never win
            settings = Settings(mx.array([top_k]), mx.array([top_p]), mx.array([temperature]))
            wanted = choose_code(
                mx.array(logits).astype(mx.float32), settings, mx.array(uniforms)
            ).item()
            with np.errstate(divide="ignore"):
                noise = -np.log(-np.log(uniforms))
            found = draw(
                logits=torch.from_numpy(logits),
                noise=torch.from_numpy(noise),
                top_k=torch.tensor([top_k], dtype=torch.int32),
                top_p=torch.tensor([top_p]),
                t=torch.tensor([temperature]),
            )["code"].item()
            chosen.append(found)
            assert found == wanted, (top_k, top_p, temperature)
    assert len(set(chosen)) > 40
