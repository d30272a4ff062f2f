"""MLX against the PyTorch reference engine on the CPU: tiny geometry, and layers of full width."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the other engine needs PyTorch")

from reference.cuda_ladder import (  # noqa: E402
    Bench,
    Climb,
    alone,
    four_bits,
    main,
    static,
    transformers,
)
from reference.dump import open_engine  # noqa: E402
from reference.record import hashes, record  # noqa: E402

from warble_mlx.convert import convert  # noqa: E402
from warble_mlx.verify.climb import verify  # noqa: E402
from warble_mlx.verify.dump import write_dump  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def assert_passes(climb: Climb, bench: Bench) -> None:
    outcomes = list(climb.run(bench))
    assert [(o.rung, o.message) for o in outcomes if o.state == "failed"] == []
    assert any(o.compared for o in outcomes)
    assert sum(o.ties for o in outcomes) == 0


@pytest.mark.parametrize(
    "climb",
    [
        transformers("tiny", "float32", 1),
        transformers("tiny", "float32", 4),
        transformers("tiny", "bfloat16", 1),
        four_bits("tiny", "float32"),
        alone("tiny", "float32"),
        static("tiny"),
    ],
    ids=lambda climb: climb.name,
)
def test_tiny_geometry(folder: Path, climb: Climb) -> None:
    assert_passes(climb, Bench(folder, "cpu", 40, ("tiny", "one layer")))


@pytest.mark.parametrize(
    "climb",
    [transformers("full", "float32", 1), four_bits("full", "float32")],
    ids=lambda climb: climb.name,
)
def test_one_layer_of_the_published_widths(folder: Path, climb: Climb) -> None:
    assert_passes(climb, Bench(folder, "cpu", 6, ("tiny", "one layer")))


def test_other_graphs(folder: Path, tmp_path: Path) -> None:
    """Options of the graph that the published model does not use."""
    from random_checkpoint import write_checkpoint

    source = write_checkpoint(
        tmp_path / "other",
        "small",
        attention_qk_norm=True,
        attention_o_bias=True,
        fast_dim=96,
        fast_attention_qkv_bias=True,
        fast_attention_qk_norm=True,
        norm_fastlayer_input=False,
    )
    write_dump(tmp_path / "dump", record(open_engine(source), frames=12))
    report = verify(source, tmp_path / "dump")
    assert report.verdict.startswith("PASSED")


def test_the_script_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What runs on a GPU in one command, tried on the CPU."""
    out = tmp_path / "report.json"
    options = ["--device", "cpu", "--quick", "--frames", "6", "--only", "batch 4"]
    assert main([*options, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [c["name"] for c in report["climbs"]] == [
        "tiny float32 batch 4", "tiny bfloat16 batch 4",
        "full float32 batch 4", "full bfloat16 batch 4",
    ]  # fmt: skip
    assert all(c["passed"] and c["outcomes"] for c in report["climbs"])
    assert report["settings"]["torch_tf32"] is False
    assert report["settings"]["MLX_ENABLE_TF32"] == "0"
    assert "4 climbs, 0 ties, failed: none" in capsys.readouterr().out


@pytest.mark.skipif(
    not os.environ.get("WARBLE_SHARED"), reason="WARBLE_SHARED names no folder of trained models"
)
def test_the_trained_small_model(tmp_path: Path) -> None:
    source = Path(os.environ["WARBLE_SHARED"]) / "tiny"
    convert(source, tmp_path / "bundle")
    write_dump(tmp_path / "dump", record(open_engine(source), checkpoint=hashes(source)))
    report = verify(tmp_path / "bundle", tmp_path / "dump")
    assert report.verdict.startswith("PASSED: the same model in float32 (against")
    assert {o.state for o in report.outcomes} == {"passed"}
