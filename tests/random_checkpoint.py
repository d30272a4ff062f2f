"""Checkpoints of any size with random weights, in the published layout, made quickly.

Scales are those of the golden data's generator; the numbers are PyTorch's, of a seed. The embedding
row of EOS is zero: its score is then 0 while the best of the others lies well above, so that a run
is as long as it is allowed to be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import make_checkpoint
from torch import Tensor

SMALL = {**make_checkpoint.PRESETS["tiny"], "dim": 64, "n_layer": 2, "intermediate_size": 128}
# Published widths, one layer each.
ONE_LAYER = {
    **make_checkpoint.PRESETS["full"],
    "n_layer": 1,
    "n_fast_layer": 1,
    "codebook_size": 1024,
    "max_seq_len": 256,
    "first_special": None,
}
SIZES = {"small": SMALL, "one layer": ONE_LAYER, **make_checkpoint.PRESETS}


def fields_of(size: str, **changes: Any) -> dict[str, Any]:
    """config.json of a size."""
    dimensions = SIZES[size]
    books = dimensions["codebook_size"]
    _, _, ids = make_checkpoint.tokenizer_files(dimensions["first_special"], books)
    fields = make_checkpoint.build_config(dimensions, ids, 8, 1216)
    return fields | {"codec_filename": "codec.safetensors"} | changes


def write_checkpoint(
    folder: Path,
    size: str,
    *,
    codec: bool = False,
    seed: int = 0,
    device: str = "cpu",
    **changes: Any,
) -> Path:
    """Write config, tokenizer, transformers and (with `codec`) a codec of the config's geometry."""
    folder.mkdir(parents=True)
    fields = fields_of(size, **changes)
    dimensions = SIZES[size]
    tokenizer, _, _ = make_checkpoint.tokenizer_files(
        dimensions["first_special"], dimensions["codebook_size"]
    )
    make_checkpoint.write_json(folder / "config.json", fields)
    make_checkpoint.write_json(folder / "tokenizer.json", tokenizer)
    random = torch.Generator(device).manual_seed(seed)

    def made(shape: tuple[int, ...], scale: float, offset: float) -> Tensor:
        return torch.randn(shape, generator=random, device=device) * scale + offset

    weights = {}
    for name, shape, scale, offset in make_checkpoint.language_model(fields):
        weight = made(shape, scale, offset).to(torch.bfloat16)
        if name == "embeddings.weight":
            weight[fields["eos_token_id"]] = 0
        weights[name] = weight.view(torch.uint16).cpu().numpy()
    make_checkpoint.write_safetensors(folder / "model.safetensors", weights, "BF16")
    if codec:
        stored = {n: made(*rule).cpu().numpy() for n, *rule in make_checkpoint.codec(fields)}
        make_checkpoint.write_safetensors(folder / "codec.safetensors", stored, "F32")
    return folder


def text_columns(fields: dict[str, Any], length: int, seed: int = 0) -> Tensor:
    """A prompt [11, length] of random text ids."""
    ids = np.random.default_rng(seed).integers(0, fields["pad_token_id"], length)
    columns = torch.zeros(11, length, dtype=torch.long)
    columns[0] = torch.from_numpy(ids)
    return columns
