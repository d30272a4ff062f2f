"""The exported MLX functions against the runtime, and that what is wrong is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import ios_data
import mlx.core as mx
import numpy as np
import pytest

from warble_mlx import cuda_kernels
from warble_mlx.codec.convolution import gpu_forms, on_cpu
from warble_mlx.codec.transformer import rope_rows
from warble_mlx.engine import Engine
from warble_mlx.errors import BudgetError, CheckpointError
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export import mlx_part
from warble_mlx.ios_export.checks import require
from warble_mlx.ios_export.drive import (
    Utterance,
    chunks,
    decode,
    generate,
    open_function,
    slots_for,
)
from warble_mlx.ios_export.graph_file import Scan, devices_in, retarget
from warble_mlx.ios_export.grid import function_grid
from warble_mlx.ios_export.job import Built, Job
from warble_mlx.ios_export.mlx_functions import (
    CODEC_FILE,
    LM_FILE,
    Codec,
    LanguageModel,
    Loaded,
    cache_lengths,
    frame_inputs,
    load_for_export,
    write_language_model,
)
from warble_mlx.layers import rope_table
from warble_mlx.weights import load_dual_ar


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> Iterator[None]:
    """Files are made for a CPU here, so that they run everywhere."""
    with mx.stream(mx.cpu):
        yield


FRAMES = 12
FEW = 5  # enough for what is wrong from the first frame on


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ios_data.four_bit_bundle(tmp_path_factory.mktemp("bundles") / "q4")


@pytest.fixture(scope="module")
def job(four_bits: Path) -> Job:
    return ios_data.job_on(four_bits, dtype="float32", device="cpu", check_frames=FRAMES)


@pytest.fixture
def quick_job(job: Job) -> Job:
    """The same for few frames, with the bundle loaded already."""
    few = ios_data.job_on(job.bundle, dtype="float32", device="cpu", check_frames=FEW)
    vars(few)["loaded"] = job.loaded
    return few


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlxfn")


@pytest.fixture(scope="module")
def built(job: Job, folder: Path) -> Built:
    return mlx_part.build(job, folder)


def failed(checks: Sequence[object]) -> list[str]:
    return [c.name for c in checks if c.result == "fail"]  # type: ignore[attr-defined]


def test_four_bit_functions_equal_the_runtime(built: Built) -> None:
    assert failed(built.checks) == []
    by_name = {check.name: check for check in built.checks}
    assert by_name["frames equal to the runtime's"].value == FRAMES
    assert by_name["healthy codes from the exported functions"].result == "pass"
    audio = by_name["audio against the runtime"]
    assert audio.value is not None
    assert audio.value > 100
    assert {c.name for c in built.checks if c.result == "unverified"} == {
        "tokens on the GPU", "speed and memory on a phone",
    }  # fmt: skip


def test_four_bits_stay_four_bits_and_there_is_one_copy(built: Built, folder: Path) -> None:
    stored = ios_data.unpacked_weights(bundled_folder()).values()
    sixteen_bits = sum(2 * tensor.size for tensor in stored)
    assert (folder / LM_FILE).stat().st_size < 0.7 * sixteen_bits
    frames = [f.name for f in built.functions if f.name.startswith("frame")]
    assert frames == ["frame_512", "frame_1024"]


def test_functions_say_what_they_take(built: Built, folder: Path, job: Job) -> None:
    run = mx.import_function(str(folder / LM_FILE))
    for function in built.functions:
        if function.file != LM_FILE or not function.name.endswith("512"):
            continue
        tensors = [*function.inputs, *(t for s in function.states for t in s.tensors)]
        given = [mx.zeros(t.shape, getattr(mx, t.dtype)) for t in tensors]
        result = run(*given)
        declared = [*function.outputs, *(t for s in function.states for t in s.tensors)]
        assert [tuple(a.shape) for a in result] == [t.shape for t in declared]
        assert [str(a.dtype).split(".")[-1] for a in result] == [t.dtype for t in declared]


def test_a_shifted_cache_slot_fails(quick_job: Job, folder: Path, built: Built) -> None:
    run = mx.import_function(str(folder / LM_FILE))

    def shifted(*arrays: mx.array) -> Sequence[mx.array]:
        if len(arrays) - quick_job.config.n_layer > 3:
            arrays = (arrays[0], arrays[1] + 1, *arrays[2:])
        return run(*arrays)

    assert "frames equal to the runtime's" in failed(mlx_part.token_checks(quick_job, shifted))


def test_where_shapes_move_tokens_the_functions_are_compared_with_themselves(
    quick_job: Job, folder: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in 16 bits. The prompt is compared with the runtime's as numbers."""
    monkeypatch.setattr(mlx_part, "same_for_any_shape", lambda _: False)
    run = open_function(folder / LM_FILE)
    found = {c.name: c for c in mlx_part.token_checks(quick_job, run)}
    assert failed(list(found.values())) == []
    assert found["frames equal to the functions' before they were written"].value == FEW
    agreement = found["prompt against the runtime"].value
    assert agreement is not None
    assert agreement > 80  # float32

    def shifted(*arrays: mx.array) -> Sequence[mx.array]:
        return run(arrays[0], arrays[1] + 1, *arrays[2:])

    assert failed(mlx_part.token_checks(quick_job, shifted)) != []


def test_a_prompt_read_wrongly_is_noticed(quick_job: Job, folder: Path, built: Built) -> None:
    run = open_function(folder / LM_FILE)
    assert mlx_part.prompt_agreement(quick_job, run) > 80

    def padding_seen(*arrays: mx.array) -> Sequence[mx.array]:
        return run(*arrays[:2], mx.zeros_like(arrays[2]), *arrays[3:])

    def shifted(*arrays: mx.array) -> Sequence[mx.array]:
        return run(arrays[0], arrays[1] + 1, *arrays[2:])

    for wrongly in (padding_seen, shifted):
        assert mlx_part.prompt_agreement(quick_job, wrongly) < mlx_part.PROMPT_LIMIT_DB - 3


def test_16_bits_on_a_gpu_round_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (mx.float32, mx.bfloat16, mx.float16)
    assert [mlx_part.same_for_any_shape(d) for d in dtypes] == [True, True, True]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert [mlx_part.same_for_any_shape(d) for d in dtypes] == [True, False, False]


def test_kernels_of_our_own_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_cuda", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert cuda_kernels.available()
    with cuda_kernels.unused():
        assert not cuda_kernels.available()
    assert cuda_kernels.available()


@pytest.fixture(scope="module")
def wrong(four_bits: Path) -> Loaded:
    """The bundle with one layer's biases read wrongly."""
    loaded = load_for_export(four_bits, mx.float32)
    linear = loaded.model.layers[3].feed_forward.w2
    linear.biases = linear.biases * 0.9
    return loaded


def test_a_wrongly_unpacked_layer_fails(quick_job: Job, wrong: Loaded, built: Built) -> None:
    checks = mlx_part.token_checks(quick_job, LanguageModel(wrong))
    assert "frames equal to the runtime's" in failed(checks)
    with pytest.raises(Exception, match="runtime"):
        require("mlxfn", checks)


def test_the_files_packed_weights_are_the_bundles(built: Built, job: Job, folder: Path) -> None:
    by_name = {check.name: check for check in built.checks}
    assert by_name["packed weights of lm.mlxfn that are not the bundle's"].result == "pass"
    inputs = frame_inputs(job.loaded, 512)
    grid = function_grid(open_function(folder / LM_FILE), inputs)
    assert len(set(grid.values())) == 44  # of 55 Linears, w1 and w3 being one


def test_other_packed_weights_in_the_file_fail(
    quick_job: Job, wrong: Loaded, tmp_path: Path
) -> None:
    """Looked for in the file: without running tokens, and whatever wrote it."""
    write_language_model(wrong, tmp_path)
    (check,) = mlx_part.weight_checks(quick_job, open_function(tmp_path / LM_FILE))
    assert (check.result, check.value) == ("fail", 2)
    assert check.note == "lacks layers.3.feed_forward.w2, has 1 of other numbers"


def test_unpacked_weights_in_the_file_fail(quick_job: Job, tmp_path: Path) -> None:
    plain = quick_job.loaded._replace(
        model=load_dual_ar(quick_job.bundle, mx.float32, dequantize=True)
    )
    plain = plain._replace(engine=Engine(plain.model, compiled=False))
    write_language_model(plain, tmp_path)
    (check,) = mlx_part.weight_checks(quick_job, open_function(tmp_path / LM_FILE))
    assert (check.result, check.value) == ("fail", 44)


def test_lost_codec_state_fails(job: Job, folder: Path, built: Built) -> None:
    run = mx.import_function(str(folder / CODEC_FILE))

    def forgetful(*arrays: mx.array) -> Sequence[mx.array]:
        samples, *state = run(*arrays)
        state[0] = state[0] + 1  # the position of the window transformer
        return [samples, *state]

    codes = np.random.default_rng(0).integers(0, 500, (20, 11)).astype(np.int32)
    checks = mlx_part.audio_checks(job, forgetful, Utterance(codes, job.config.codebook_size))
    assert "audio against the runtime" in failed(checks)


def test_the_device_is_rewritten_and_nothing_else(
    job: Job, folder: Path, built: Built, tmp_path: Path
) -> None:
    function = Codec(job.loaded)
    scan = Scan()
    arrays = [mx.zeros((1, 10, 1), mx.int32), *function.initial_state()]
    scan.add(function, arrays)
    mx.export_function(str(tmp_path / "f"), function, *arrays)
    assert devices_in(tmp_path / "f", scan.operations) == {"cpu": sum(scan.operations.values())}
    retarget(tmp_path / "f", tmp_path / "g", scan.operations, "gpu")
    assert devices_in(tmp_path / "g", scan.operations) == {"gpu": sum(scan.operations.values())}
    before, after = (np.frombuffer((tmp_path / n).read_bytes(), np.uint8) for n in "fg")
    assert (before != after).sum() == sum(scan.operations.values())
    retarget(tmp_path / "g", tmp_path / "h", scan.operations, "cpu")
    assert (tmp_path / "h").read_bytes() == (tmp_path / "f").read_bytes()


def test_a_stream_of_any_index_is_found(tmp_path: Path) -> None:
    """Beside a GPU the CPU's stream is not the first."""

    def function(x: mx.array) -> mx.array:
        return mx.sqrt(x) + 1

    scan, arrays = Scan(), [mx.array([4.0])]
    scan.add(function, arrays)
    with mx.stream(mx.new_stream(mx.cpu)):
        mx.export_function(str(tmp_path / "f"), function, *arrays)
    with mx.stream(mx.default_stream(mx.cpu)):
        mx.export_function(str(tmp_path / "first"), function, *arrays)
    assert (tmp_path / "f").read_bytes() != (tmp_path / "first").read_bytes()
    assert devices_in(tmp_path / "f", scan.operations) == {"cpu": sum(scan.operations.values())}
    (result,) = open_function(tmp_path / "f")(*arrays)
    assert result.item() == 3


def test_a_file_with_other_operations_is_refused(
    folder: Path, built: Built, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="were traced"):
        retarget(folder / CODEC_FILE, tmp_path / "x", {"Add": 3}, "gpu")
    assert not (tmp_path / "x").exists()


def test_gpu_forms_are_used_for_a_gpu_only() -> None:
    assert on_cpu()
    with gpu_forms():
        assert not on_cpu()
    assert on_cpu()


def test_gpu_forms_give_the_same_sound(job: Job) -> None:
    codes = np.random.default_rng(1).integers(0, 500, (10, 9)).astype(np.int32)
    function = Codec(job.loaded)
    plain = decode(function, codes, function.initial_state())
    with gpu_forms():
        other = decode(function, codes, function.initial_state())
    assert np.abs(plain - other).max() < 1e-5
    assert np.abs(plain).max() > 0.01


def test_the_codecs_table_is_what_it_computes() -> None:
    wanted = rope_rows(mx.arange(2048), 64, 10000.0)
    assert mx.array_equal(rope_table(2048, 64, 10000.0), wanted)


def test_prompts_are_read_in_the_longest_chunks() -> None:
    assert list(chunks(320)) == [128, 128, 32, 32]
    assert list(chunks(32)) == [32]


def test_a_prompt_that_does_not_fit_is_told(job: Job) -> None:
    lengths = cache_lengths(job.config)
    assert slots_for(job.config, lengths, 60, 300) == 512
    assert slots_for(job.config, lengths, 60, 500) == 1024
    with pytest.raises(BudgetError, match="shorten the text"):
        slots_for(job.config, lengths, 600, 500)


def test_greedy_is_one_candidate(job: Job, folder: Path, built: Built) -> None:
    from warble_mlx.engine import Request, Sampling

    greedy = Sampling(temperature=0)
    prompt = job.prompt("Hello.")
    run = mx.import_function(str(folder / LM_FILE))
    found = generate(
        run, job.config, job.dtype, prompt.columns, 512, frames=6, sampling=greedy, seed=5
    )
    asked = job.loaded.engine.generate([Request(prompt, 6, greedy, 1)])
    wanted = np.stack([e.codes for e in asked if e.codes is not None])
    assert (found.emitted[:, 1:] == wanted).all()
