"""README.md of a bundle: a model card with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from warble_mlx import __version__
from warble_mlx.convert.report import Component
from warble_mlx.convert.source import member

TAGS = ("mlx", "arktts", "tts", "voice-cloning", "apple-silicon")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LICENCE_LINE = re.compile(r"(license|license_name|license_link): *([\w.:/#?=-]+) *")


def licence_lines(folder: Path) -> list[str]:
    """The licence lines of the front matter of `folder`/README.md; none if it has none."""
    path = member(folder, "README.md")
    text = path.read_text(encoding="utf-8", errors="replace") if path else ""
    parts = re.split(r"^---[ \t]*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3 or parts[0].strip():
        return []
    matches = (_LICENCE_LINE.fullmatch(line) for line in parts[1].splitlines())
    return [f"{match[1]}: {match[2]}" for match in matches if match]


def model_card(
    *,
    source_id: str,
    revision: str | None,
    licence: Sequence[str],
    components: Sequence[Component],
    precision: str,
    extra_tags: Sequence[str] = (),
    languages: Sequence[str] = (),
    sections: Sequence[str] = (),
) -> str:
    """Text of the card. `precision` says in a few words how the weights are stored; `sections`
    stand behind the sizes."""
    front = ["library_name: mlx", "pipeline_tag: text-to-speech", *licence]
    if languages:
        front += ["language:", *(f"- {language}" for language in languages)]
    if _HUB_ID.fullmatch(source_id):
        front += [f"base_model: {source_id}", "base_model_relation: quantized"]
    front += ["tags:", *(f"- {tag}" for tag in (*TAGS, *extra_tags))]
    sizes: dict[str, list[int]] = {}
    for part in components:
        line = sizes.setdefault(part.file, [0, 0])
        line[0] += part.parameters
        line[1] += part.nbytes
    rows = [f"| {f} | {n:,} | {size / 1e6:,.1f} |" for f, (n, size) in sizes.items()]
    origin = f"`{source_id}`" + (f" at revision `{revision}`" if revision else "")
    terms = "as stated above" if licence else "see the source"
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            f"# {source_id.rsplit('/', 1)[-1]} for MLX",
            "",
            f"Converted from {origin} by warble-mlx {__version__}. {precision}",
            "",
            "```",
            "pip install warble-mlx",
            'warble say --model <this repository or folder> "Hello there."',
            "```",
            "",
            "| file | parameters | MB |",
            "| :-- | --: | --: |",
            *rows,
            "",
            "`codec_encoder.safetensors` is only needed to register a voice from a clip.",
            "",
            *(line for section in sections for line in (section, "")),
            f"Credits: the weights are the work of the authors of {origin}; this is another way to"
            " store them.",
            "",
            f"Licence: that of the source model, {terms}; notices of the source are kept beside"
            " this file. Speech made with this model is synthetic: say so where it could be taken"
            " for a recording, and clone a voice only with its owner's consent.",
            "",
        ]
    )
