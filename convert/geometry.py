"""The codec's dimensions, read from the tensors and held against config.json.

Published configs leave codec fields out, and the first release's source code names other values
than the published weights have. The tensors are what will be computed with, so they decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from warble_mlx.config import CODEC_HEAD_DIM, ENCODER_STRIDES, ModelConfig
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import Shape

Shapes = Mapping[str, Shape]


class Finding(NamedTuple):
    """What the tensors say about a config field, and which tensor says it."""

    field: str
    value: int | list[int]
    tensor: str


def codec_fields(shapes: Shapes, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Config fields that follow from the codec's tensor shapes.

    `shapes` are those of either layout (only axes that both share are looked at), with folded
    names. Fields whose tensor is absent are left out: the tensor is missed later, by name.

    Raises CheckpointError if `config` has one of the fields with another value.
    """
    findings = list(_findings(shapes))
    wrong = [
        f"{f.field} is {config[f.field]}, but {f.tensor} {list(shapes[f.tensor])} says {f.value}"
        if f.tensor in shapes
        else f"{f.field} is {config[f.field]}, but the tensors {f.tensor} say {f.value}"
        for f in findings
        if f.field in config and config[f.field] != f.value
    ]
    if wrong:
        raise CheckpointError(
            f"{where} contradicts the tensors: {'; '.join(wrong[:5])}."
            " Correct the field, or remove it to follow the tensors"
        )
    return {f.field: f.value for f in findings}


_SEMANTIC_BOOK = "quantizer.semantic_quantizer.quantizers.0.codebook.weight"
_RESIDUAL_BOOK = "quantizer.quantizer.quantizers.0.codebook.weight"
# Field, tensor, axis. These axes are the same in the PyTorch and in the MLX layout.
_AXES = (
    ("codec_encoder_dim", "encoder.block.0.conv.weight", 0),
    ("codec_latent_dim", "quantizer.post_module.norm.weight", 0),
    ("codec_decoder_dim", "decoder.model.0.conv.weight", 0),
    ("codec_semantic_codebook_size", _SEMANTIC_BOOK, 0),
    ("codec_codebook_dim", _SEMANTIC_BOOK, 1),
    ("codec_residual_codebook_size", _RESIDUAL_BOOK, 0),
)


def _findings(shapes: Shapes) -> Iterator[Finding]:
    for name, tensor, axis in _AXES:
        if axis < len(shapes.get(tensor, ())):
            yield Finding(name, shapes[tensor][axis], tensor)
    for side in ("pre", "post"):
        yield from _window_transformer(shapes, side)
    if any(name.startswith("encoder.") for name in shapes):
        layers = [
            count_layers(shapes, f"encoder.block.{block}.block.5.")
            for block in range(1, len(ENCODER_STRIDES) + 1)
        ]
        stem = "encoder.block.{1..4}.block.5.layers.*"
        yield Finding("codec_encoder_transformer_layers", layers, stem)


def _window_transformer(shapes: Shapes, side: str) -> Iterator[Finding]:
    prefix, stem = f"codec_{side}", f"quantizer.{side}_module."
    layers = count_layers(shapes, stem)
    if not layers:
        return
    yield Finding(f"{prefix}_n_layer", layers, f"{stem}layers.*")
    names = {
        part: f"{stem}layers.0.{part}.weight"
        for part in ("attention.wo", "attention.wqkv", "feed_forward.w1")
    }
    wo, wqkv, w1 = (shapes.get(name, ()) for name in names.values())
    if len(wo) != 2 or len(wqkv) != 2 or len(w1) != 2:
        return
    heads, odd_columns = divmod(wo[1], CODEC_HEAD_DIM)
    kv_heads, odd_rows = divmod(wqkv[0] // CODEC_HEAD_DIM - heads, 2)
    if odd_columns or odd_rows or wqkv[0] % CODEC_HEAD_DIM or kv_heads < 1:
        raise CheckpointError(
            f"{names['attention.wqkv']} {list(wqkv)} and {names['attention.wo']} {list(wo)} do not"
            f" give whole heads of width {CODEC_HEAD_DIM}"
        )
    yield Finding(f"{prefix}_n_head", heads, names["attention.wo"])
    yield Finding(f"{prefix}_n_local_heads", kv_heads, names["attention.wqkv"])
    yield Finding(f"{prefix}_intermediate_size", w1[0], names["feed_forward.w1"])


def check_layer_counts(shapes: Shapes, config: ModelConfig, where: str) -> None:
    """Raise CheckpointError if the DualAR has more or fewer layers than config.json says."""
    for stem, name, want in (
        ("", "n_layer", config.n_layer),
        ("fast_", "n_fast_layer", config.n_fast_layer),
    ):
        have = count_layers(shapes, stem)
        if have != want:
            elsewhere = next((n for n in shapes if f".{stem}layers.0." in n), None)
            hint = "" if have or not elsewhere else f"; the names begin differently: {elsewhere}"
            raise CheckpointError(
                f"{where} contradicts the tensors: {name} is {want}, but {have} layers are stored"
                f" as {stem}layers.*{hint}"
            )


def count_layers(shapes: Shapes, stem: str) -> int:
    """Number of layers stored below `stem`. A hole in the numbering shows up later, by name."""
    prefix = f"{stem}layers."
    indices = (
        name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)
    )
    return len({index for index in indices if index.isdecimal()})
