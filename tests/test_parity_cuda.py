"""MLX on CUDA against the PyTorch reference engine on CUDA.

`python -m reference.cuda_ladder` runs the same without pytest and writes a report.
"""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

torch = pytest.importorskip("torch", reason="the other engine needs PyTorch")

from reference.cuda_ladder import CLIMBS, Bench, Climb  # noqa: E402
from reference.dump import forbid_tf32  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
    pytest.mark.skipif(
        not (hasattr(mx, "cuda") and mx.cuda.is_available()), reason="MLX has no CUDA device"
    ),
    pytest.mark.skipif(
        os.environ.get("MLX_ENABLE_TF32") != "0",
        reason="MLX_ENABLE_TF32=0 must be in the environment, or float32 is not float32",
    ),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    forbid_tf32()
    return Bench(tmp_path_factory.mktemp("checkpoints"), "cuda", 300, ("tiny", "full"))


@pytest.mark.parametrize("climb", CLIMBS, ids=lambda climb: climb.name)
def test_every_rung(bench: Bench, climb: Climb) -> None:
    outcomes = list(climb.run(bench))
    for outcome in outcomes:
        print(outcome)
    assert [(o.rung, o.message) for o in outcomes if o.state == "failed"] == []
