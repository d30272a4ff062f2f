"""Dumps: the reference engine's, and the adapter for the published code with a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import synthetic
from golden_data import assert_close

torch = pytest.importorskip("torch", reason="the reference engine needs PyTorch")

from published_stand_in import StandIn  # noqa: E402
from reference.bundle import read_bundle_model  # noqa: E402
from reference.dump import ReferenceEngine, open_engine  # noqa: E402
from reference.load import read_model  # noqa: E402
from reference.published import PublishedEngine, Refused  # noqa: E402
from reference.record import record  # noqa: E402
from reference.small_dump import FRAMES, PATH, SAMPLED_FRAMES, SEED, small_dump  # noqa: E402

from warble_mlx.verify.dump import Dump, read_dump  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_source(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="module")
def reference(source: Path) -> ReferenceEngine:
    return open_engine(source)


@pytest.fixture
def stand_in(reference: ReferenceEngine) -> StandIn:
    model = StandIn(reference.config)
    model.load_state_dict(reference.model.state_dict())
    model.requires_grad_(False)
    model.prepare()
    model.codec = reference.codec
    return model


class Processor:
    """The published processor's outside."""

    def __init__(self, reference: ReferenceEngine) -> None:
        self.reference = reference

    def __call__(
        self,
        text: str,
        reference_text: str | None = None,
        reference_codes: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        columns = self.reference.prompt(text, reference_text, reference_codes)
        at = columns.shape[1]
        after = at
        if reference_codes is not None:
            voiced = (columns[0] >= self.reference.config.semantic_begin_id).nonzero()
            at, after = int(voiced[0]), int(voiced[-1]) + 1
        return {
            "prefix_input_ids": columns[:1, :at],
            "suffix_input_ids": columns[:1, after:],
        }


def assert_same_dump(got: Dump, wanted: Dump) -> None:
    assert got.tensors.keys() == wanted.tensors.keys()
    for name, value in wanted.tensors.items():
        if value.dtype == np.int32:
            assert np.array_equal(got[name], value), name
        else:
            assert_close(got[name], value, 1e-4, name)


def test_the_small_dump_is_what_the_engine_computes(tmp_path: Path) -> None:
    """Weights, prompts and uniforms follow from names and a seed, on every machine."""
    made, kept = small_dump(tmp_path / "checkpoint"), read_dump(PATH)
    assert_same_dump(made, kept)
    assert made.info.cases == kept.info.cases
    assert made.info.checkpoint["model.safetensors"] == kept.info.checkpoint["model.safetensors"]
    assert made.info.config == kept.info.config


def test_the_adapter_records_what_the_reference_engine_records(
    reference: ReferenceEngine, stand_in: StandIn
) -> None:
    engine = PublishedEngine(
        stand_in, reference.config, Processor(reference), reference.codec, "float32"
    )
    options = {"frames": FRAMES, "sampled_frames": SAMPLED_FRAMES, "seed": SEED}
    made = record(engine, **options)
    assert_same_dump(made, record(reference, **options))
    assert made.info.engine == "the published remote code"
    assert made.info.versions["transformers"]


def fill(name: str, value: float) -> Callable[[StandIn], None]:
    def broken(model: StandIn) -> None:
        setattr(model, name, torch.full_like(getattr(model, name), value))

    return broken


def one_entry(model: StandIn) -> None:
    model.freqs_cis[-1, 0, 1] += 0.02


def half_rotation(model: StandIn) -> None:
    model.fast_freqs_cis = model.fast_freqs_cis.flip(1)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (fill("freqs_cis", 0.0), "table freqs_cis is wrong"),
        (fill("freqs_cis", float("nan")), "table freqs_cis is wrong"),
        (fill("fast_freqs_cis", 1e38), "table fast_freqs_cis is wrong in 160 of 160"),
        (one_entry, "wrong in 1 of"),
        (half_rotation, "table fast_freqs_cis is wrong"),
    ],
)
def test_wrong_tables_are_refused(
    reference: ReferenceEngine, stand_in: StandIn, do: Callable[[StandIn], None], says: str
) -> None:
    do(stand_in)
    with pytest.raises(Refused, match=says) as refused:
        PublishedEngine(stand_in, reference.config)
    assert "pip install 'transformers==4.57.5'" in str(refused.value)


def test_scores_that_are_not_finite_are_refused(
    reference: ReferenceEngine, stand_in: StandIn
) -> None:
    stand_in.fast_norm.weight[3] = torch.inf
    with pytest.raises(Refused, match="scores are not finite") as refused:
        PublishedEngine(stand_in, reference.config)
    assert "pip install 'transformers==4.57.5'" in str(refused.value)


def test_another_release_is_refused(reference: ReferenceEngine, stand_in: StandIn) -> None:
    del stand_in.fast_freqs_cis
    with pytest.raises(Refused, match="has no fast_freqs_cis: this is another release"):
        PublishedEngine(stand_in, reference.config)


def test_other_draws_are_refused(reference: ReferenceEngine, stand_in: StandIn) -> None:
    engine = PublishedEngine(stand_in, reference.config, Processor(reference))
    pick = stand_in._pick

    def twice(*args: object) -> torch.Tensor:
        pick(*args)
        return pick(*args)

    stand_in._pick = twice
    with pytest.raises(Refused, match=r"drew numbers of shape \[1, 367\] where \[1, 64\] was"):
        record(engine, frames=2, sampled_frames=2)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.2)])
def test_quantised_bundles_are_read(source: Path, tmp_path: Path, bits: int, limit: float) -> None:
    """Dequantised weights are near the source's, and equal to MLX's own dequantisation."""
    import mlx.core as mx
    import msgspec

    weights = mx.load(str(source / "model.safetensors"))
    names = [n for n in weights if "layers." in n and weights[n].ndim == 2]
    packed = dict(weights)
    for name in names:
        triple = mx.quantize(weights[name], group_size=32, bits=bits)
        stem = name.removesuffix(".weight")
        packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), triple, strict=True))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), packed)
    config = msgspec.json.decode((source / "config.json").read_bytes())
    config["quantization"] = {"bits": bits, "group_size": 32, "mode": "affine"}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    found, exact = read_bundle_model(tmp_path), read_model(source)
    assert found.keys() == exact.keys()
    for name in names:
        stem = name.removesuffix(".weight")
        own = mx.dequantize(
            packed[name],
            packed[f"{stem}.scales"].astype(mx.float32),
            packed[f"{stem}.biases"].astype(mx.float32),
            group_size=32,
            bits=bits,
        )
        assert_close(found[name], np.array(own), 1e-6, name)
        assert_close(found[name], exact[name].float(), limit, name)
