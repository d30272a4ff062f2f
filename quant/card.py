"""README.md of a quantised bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from warble_mlx.convert.card import licence_lines, model_card
from warble_mlx.convert.report import Component
from warble_mlx.fidelity.compare import Fidelity
from warble_mlx.fidelity.report import fidelity_markdown
from warble_mlx.inspect_bundle import describe_bundle
from warble_mlx.quant.policy import Packing


def write_card(
    bundle: Path,
    stage: Path,
    default: Packing,
    layers: Mapping[str, Packing],
    method: str,
    fidelity: Fidelity | None,
) -> None:
    """Write the model card of the bundle in `stage`, which was made from `bundle`."""
    described = describe_bundle(stage)
    parts = [Component(p.name, p.file, p.tensors, p.parameters, p.nbytes) for p in described.parts]
    odd: dict[Packing, int] = {}
    for packing in layers.values():
        if packing != default:
            odd[packing] = odd.get(packing, 0) + 1
    exceptions = "".join(f"; {n} of them in {p.bits} bits" for p, n in odd.items())
    card = model_card(
        source_id=described.provenance.get("source", "unknown"),
        revision=described.provenance.get("revision"),
        licence=licence_lines(bundle),
        components=parts,
        precision=(
            f"The {len(layers)} Linears of the transformer blocks in {default.bits} bits"
            f" ({default.mode}, groups of {default.group_size}, {method}{exceptions}); embeddings,"
            " output heads and norms in bfloat16."
        ),
        extra_tags=("quantized", f"{default.bits}-bit"),
        languages=sorted({v.language for v in described.voices.voices if v.language}),
        sections=() if fidelity is None else (fidelity_markdown(fidelity),),
    )
    (stage / "README.md").write_text(card, encoding="utf-8")
