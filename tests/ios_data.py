"""Bundles that the export tests share, and a job on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx

from warble_mlx.config import read_config, read_config_json
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export.job import Job, Options
from warble_mlx.quant.policy import DEFAULT_POLICY, POLICIES
from warble_mlx.weights import MODEL_FILE


def job_on(bundle: Path, **options: object) -> Job:
    """An export job with nothing built yet."""
    chosen = Options(**options)  # type: ignore[arg-type]
    return Job(bundle, read_config(bundle), read_config_json(bundle), chosen)


def four_bit_bundle(folder: Path, source: Path | None = None) -> Path:
    """A copy of a bundle, the bundled one if none is given, with its block Linears in 4 bits."""
    source = source or bundled_folder()
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != MODEL_FILE:
            shutil.copyfile(path, folder / path.name)
    packs = POLICIES[DEFAULT_POLICY]
    written = {}
    weights = mx.load(str(source / MODEL_FILE))
    assert isinstance(weights, dict)
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if not packs(path):
            written[name] = weight
            continue
        packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
        written |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
    mx.save_safetensors(str(folder / MODEL_FILE), written, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
