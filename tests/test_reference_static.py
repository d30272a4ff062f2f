"""The static-shape and the partly compiled mode of the reference engine, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden_data import assert_same_codes, tensors

torch = pytest.importorskip("torch", reason="the reference engine needs PyTorch")

from reference.generate import generate  # noqa: E402
from reference.load import load_dual_ar  # noqa: E402
from reference.sampling import Sampling  # noqa: E402
from reference.static import StaticEngine  # noqa: E402
from reference.transformer import DualAR  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tiny_source: Path) -> DualAR:
    return load_dual_ar(tiny_source)


def prompt(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    golden = tensors("ar_tiny")
    ids = torch.from_numpy(golden[f"{case}.prompt_ids"]).long()
    return ids, torch.from_numpy(golden[f"{case}.prompt_mask"]).bool()


class Counting(StaticEngine):
    """Counts frames that were asked for."""

    asked = 0

    def _step(self, draws: bool) -> None:
        self.asked += 1
        super()._step(draws)


def test_the_end_is_seen_one_frame_late(model: DualAR) -> None:
    """Fourteen frames and EOS are fifteen; one more is computed in vain, and no second one."""
    columns, mask = prompt("p4")
    engine = Counting(model, 1, columns.shape[2] + 80)
    assert engine.run(columns, mask, 80).lengths == [14]
    assert engine.asked == 14 + 1 + 1


def test_an_engine_can_be_used_again(model: DualAR) -> None:
    """Buffers of an earlier, longer run leave no trace."""
    engine = StaticEngine(model, 1, 160)
    wanted = tensors("ar_tiny")
    for case, frames in (("p1", 48), ("p4", 80), ("p1", 48)):
        result = engine.run(*prompt(case), frames)
        assert_same_codes(result.codes[0].numpy(), wanted[f"{case}.codes"][0], case)


def test_it_draws_its_own_numbers(model: DualAR) -> None:
    columns, mask = prompt("p1")
    engine = StaticEngine(model, 1, columns.shape[2] + 12, Sampling())
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(engine.run(columns, mask, 12, ignore_eos=True).codes.numpy())
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_a_run_must_fit(model: DualAR) -> None:
    columns, mask = prompt("p1")
    engine = StaticEngine(model, 1, columns.shape[2] + 4)
    with pytest.raises(ValueError, match="5 frames wanted, but there are slots for 4"):
        engine.run(columns, mask, 5)


def test_ignoring_eos_gives_every_frame(model: DualAR) -> None:
    columns, mask = prompt("p4")
    eager = generate(model, columns, mask, 20, ignore_eos=True)
    static = StaticEngine(model, 1, columns.shape[2] + 20).run(columns, mask, 20, ignore_eos=True)
    assert eager.lengths == static.lengths == [20]
    assert_same_codes(static.codes[0].numpy(), eager.codes[0].numpy(), "past the end")


def test_the_slow_step_compiles_whole_and_once(model: DualAR) -> None:
    """One graph without a break for all steps, and the same codes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model.advance, fullgraph=True, backend=counter)
    columns, mask = prompt("p4")
    result = generate(model, columns, mask, 80, advance=step)
    assert_same_codes(result.codes[0].numpy(), tensors("ar_tiny")["p4.codes"][0], "compiled")
    assert counter.frame_count == 1


def test_the_benchmark_reports_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from reference.benchmark import main

    out = tmp_path / "speed.json"
    options = ["--device", "cpu", "--size", "tiny", "--frames", "12", "--runs", "1"]
    assert main([*options, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["mode"] for row in report["rows"]] == ["eager", "partly compiled", "static"]
    assert report["useful_bytes"] > 1e6
    assert report["copy_bandwidth"] > 0
    for row in report["rows"]:
        assert row["rtf"] == pytest.approx(row["ms_per_frame"] / 46.44, 1e-3)
        assert row["share_of_copy"] == pytest.approx(row["bandwidth"] / report["copy_bandwidth"])
    assert "of copy" in capsys.readouterr().out
