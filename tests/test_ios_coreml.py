"""The Core ML packages of a small codec against the runtime, and what has to fail."""

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

from warble_mlx.bench.synthetic import TINY  # noqa: E402
from warble_mlx.errors import CheckpointError  # noqa: E402
from warble_mlx.hub import bundled_folder  # noqa: E402
from warble_mlx.ios_export.checks import decibels  # noqa: E402
from warble_mlx.ios_export.coreml_codec import (  # noqa: E402
    AUDIO_LIMIT_DB,
    FIRST_LIMIT_DB,
    FUNCTIONS,
    POST_MODULE,
    VOCODER,
    Packages,
    accuracy_checks,
    codec_checks,
    decoder_weights,
    first_frames_decibels,
    range_check,
    runtime_latents,
    whole_chunks,
    write_packages,
)
from warble_mlx.ios_export.coreml_convert import Input, to_package  # noqa: E402
from warble_mlx.ios_export.coreml_static import functions_of, package_checks  # noqa: E402
from warble_mlx.ios_export.job import Job  # noqa: E402
from warble_mlx.ios_export.mil_eval import Program  # noqa: E402
from warble_mlx.ios_export.mil_ops import OPERATIONS  # noqa: E402
from warble_mlx.ios_export.mlx_part import runtime_samples  # noqa: E402
from warble_mlx.ios_export.torch_codec import Vocoder, extents  # noqa: E402

Codes = npt.NDArray[np.int32]
Samples = npt.NDArray[np.float32]
Vocoders = dict[int, Vocoder]  # by frames of a call


@pytest.fixture(scope="module", autouse=True)
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The converter's libraries warn of each other's age."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on a bundle whose codec is small and random."""
    bundle = Path(shutil.copytree(bundled_folder(), tmp_path_factory.mktemp("bundle") / "tiny"))
    (bundle / "config.json").write_bytes(msgspec.json.encode(TINY))
    stored = {name: w.astype(mx.float16) for name, w in ios_data.calm_codec(TINY)}
    mx.save_safetensors(str(bundle / "codec_decoder.safetensors"), stored)
    return ios_data.job_on(bundle)


@pytest.fixture(scope="module")
def folder(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("coreml")
    write_packages(job, found)
    return found


@pytest.fixture(scope="module")
def codes() -> Codes:
    """Longer than the window of post_module and than the vocoder's history."""
    return np.random.default_rng(3).integers(0, 64, (10, 29)).astype(np.int32)


@pytest.fixture(scope="module")
def samples(job: Job, codes: Codes) -> Samples:
    return runtime_samples(job, codes)


@pytest.mark.slow
def test_both_packages_equal_the_runtime(
    job: Job, folder: Path, codes: Codes, samples: Samples
) -> None:
    found = {c.name: c for c in codec_checks(job, folder, codes, samples)}
    assert [c.name for c in found.values() if c.result == "fail"] == []
    audio = found["audio of post_module and vocoder"].value
    assert audio is not None
    assert audio > 55
    assert sorted(p.name for p in folder.iterdir()) == [POST_MODULE, VOCODER]


@pytest.mark.slow
def test_functions_are_described(folder: Path, job: Job) -> None:
    vocoder = {f.name: f for f in functions_of(folder / VOCODER, {"first": "one"})}
    assert set(vocoder) == set(FUNCTIONS)
    window = extents()[0] + 7
    assert [(t.name, t.shape, t.dtype) for t in vocoder["stream"].inputs] == [
        ("latents", (1, job.config.codec_latent_dim, window), "float16"),
        ("hist", (1,), "int32"),
    ]
    assert vocoder["stream"].outputs[0].shape == (1, 1, 7 * 2048)
    assert vocoder["stream"].longest_axis <= 16_384
    assert vocoder["first"].about == "one"
    (post, _) = functions_of(folder / POST_MODULE, {})
    assert {t.name for state in post.states for t in state.tensors} == {
        "past_keys", "past_values",
    }  # fmt: skip


# ---------------------------------------------------------------------- controls


@pytest.mark.slow
@pytest.mark.parametrize("error", [1, -1, -11])
def test_a_wrong_history_length_fails(
    job: Job, folder: Path, codes: Codes, samples: Samples, error: int
) -> None:
    """Too much history, too little, and none at all."""
    frame_size, few = job.config.codec_frame_size, codes[:, :15]  # the last call has all of it
    found = Packages(folder, job.config).decode(few, hist_error=error)
    wanted = samples[: 15 * frame_size]  # the decoder looks back only
    results = {c.name: c.result for c in accuracy_checks(found, found.latents, wanted, frame_size)}
    assert results["audio of the worst first frame"] == "fail"


@pytest.mark.slow
def test_a_shifted_state_fails(
    job: Job, folder: Path, codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = Packages(folder, job.config)
    plain = packages._latents

    def shifted(name: str, part: object, at: int) -> object:
        for program in packages.post.values():
            program.state = {n: torch.roll(v, 1, dims=2) for n, v in program.state.items()}
        return plain(name, part, at)  # type: ignore[arg-type]

    monkeypatch.setattr(packages, "_latents", shifted)
    found = packages.decode(codes)
    frame_size = job.config.codec_frame_size
    latents, *_ = accuracy_checks(found, runtime_latents(job, codes), found.samples, frame_size)
    assert latents.result == "fail"


def test_values_beyond_sixteen_bits_are_noticed() -> None:
    assert range_check("x", {"a": 2.0, "b": 2.9e4}).result == "pass"
    assert range_check("x", {"a": 2.0, "b": 3.1e4}).result == "fail"
    assert range_check("x", {"a": float("nan"), "b": 1.0}).result == "fail"
    assert range_check("x", {"a": float("inf"), "b": 1.0}).note == "a"


class Long(torch.nn.Module):  # type: ignore[misc,name-defined]
    def forward(self, x: object) -> object:
        return torch.nn.functional.pad(x, (16_384, 0)) * 2.0


def test_static_limits_are_noticed(tmp_path: Path) -> None:
    to_package(Long(), [Input("x", (1, 4))], {"y": False}, tmp_path / "long.mlpackage")
    failed = {c.name for c in package_checks(tmp_path / "long.mlpackage") if c.result == "fail"}
    assert "longest axis in long.mlpackage" in failed


def test_the_evaluator_knows_when_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_package(Long(), [Input("x", (1, 4))], {"y": False}, tmp_path / "m.mlpackage")
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).half()
    (y,) = Program(tmp_path / "m.mlpackage")(x=x).values()
    assert y.shape == (1, 16_388)
    assert y[0, -4:].tolist() == [2.0, 4.0, 6.0, 8.0]
    with pytest.raises(CheckpointError, match="lacks"):
        Program(tmp_path / "m.mlpackage")()
    with pytest.raises(CheckpointError, match="no function other"):
        Program(tmp_path / "m.mlpackage", "other")
    monkeypatch.delitem(OPERATIONS, "pad")
    with pytest.raises(CheckpointError, match="pad is not known"):
        Program(tmp_path / "m.mlpackage")(x=x)


def test_sixteen_bits_are_rounded_like_sixteen_bits(tmp_path: Path) -> None:
    to_package(Long(), [Input("x", (1, 4))], {"y": False}, tmp_path / "m.mlpackage")
    x = torch.tensor([[4e4, 1.0, 1.0, 1.0]]).half()
    (y,) = Program(tmp_path / "m.mlpackage")(x=x).values()
    assert torch.isinf(y[0, -4])


# ---------------------------------------------------------------------- the rewritten vocoder


@pytest.fixture(scope="module")
def latents(job: Job) -> torch.Tensor:
    """Random latents [1, D, 22], behind a history of zeros."""
    values = torch.randn(1, job.config.codec_latent_dim, 22, generator=torch.manual_seed(0))
    return torch.nn.functional.pad(values, (extents()[0], 0))


@pytest.fixture(scope="module")
def at_once(job: Job, latents: torch.Tensor) -> Samples:
    """Samples of all latents in one call of the rewritten vocoder, in float32."""
    with torch.no_grad():
        whole = Vocoder(job.config, decoder_weights(job.bundle), 22)
        samples: Samples = whole(latents, torch.tensor([0])).numpy().ravel()
    return samples


@pytest.fixture(scope="module")
def vocoders(job: Job) -> Vocoders:
    weights = decoder_weights(job.bundle)
    return {n: Vocoder(job.config, weights, n) for n in FUNCTIONS.values()}


def streamed(
    vocoders: Vocoders, latents: torch.Tensor, frames: int, hist_error: int = 0
) -> Samples:
    """Samples of the first `frames`: one frame, then seven and seven."""
    context = extents()[0]
    pieces, at = [], 0
    with torch.no_grad():
        while at < frames:
            n = 7 if at else 1
            known = min(max(min(at, context) + hist_error, 0), context)
            pieces.append(vocoders[n](latents[..., at : at + context + n], torch.tensor([known])))
            at += n
    samples: Samples = torch.cat(pieces, -1).numpy().ravel()
    return samples


def test_streaming_is_exact_in_float32(
    job: Job, vocoders: Vocoders, latents: torch.Tensor, at_once: Samples
) -> None:
    """Pieces from the very start are the same as everything at once."""
    found = streamed(vocoders, latents, 22)
    assert decibels(found, at_once) > 100
    assert first_frames_decibels(found, at_once, job.config.codec_frame_size) > 100
    assert np.abs(at_once).max() > 0.01


@pytest.mark.parametrize("error", [1, -1])
def test_one_frame_of_history_more_or_less_is_noticed(
    job: Job, vocoders: Vocoders, latents: torch.Tensor, at_once: Samples, error: int
) -> None:
    found = streamed(vocoders, latents, 8, error)
    worst = first_frames_decibels(found, at_once[: len(found)], job.config.codec_frame_size)
    assert worst < FIRST_LIMIT_DB


def test_first_frames_are_judged_one_by_one() -> None:
    """What is lost in the whole, or hidden by silence, is noticed; rounding of silence is not."""
    wave = np.sin(np.arange(29 * 100, dtype=np.float32))
    wave[:100] *= 1e-3
    wrong = wave.copy()
    wrong[:100] *= 2.5
    assert decibels(wrong, wave) > AUDIO_LIMIT_DB
    assert first_frames_decibels(wrong, wave, 100) == pytest.approx(36.3, abs=0.1)
    assert first_frames_decibels(wave + np.float32(1e-5), wave, 100) > 70
    wrong = wave.copy()
    wrong[11 * 100 :] = 0  # these frames have all of their history
    assert first_frames_decibels(wrong, wave, 100) == np.inf
    wrong[1050] = np.nan
    assert not first_frames_decibels(wrong, wave, 100) >= FIRST_LIMIT_DB


def test_history_is_what_the_layers_reach() -> None:
    assert extents() == (11, [20, 26], [94, 111, 122, 84])


def test_chunks_are_whole() -> None:
    assert [whole_chunks(n) for n in (1, 7, 8, 14, 29)] == [1, 1, 8, 8, 29]
