"""The size table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import synthetic

from warble_mlx.convert import convert, format_report
from warble_mlx.convert.names import COMPONENTS, DECODER, ENCODER, FILES, MODEL
from warble_mlx.safetensors_file import read_header


def test_sums_are_those_of_the_files(tmp_path: Path) -> None:
    source = synthetic.write_source(
        tmp_path / "source",
        edit_codec=lambda t: {**t, "quantizer.freqs_cis": np.zeros(2, np.float32)},
    )
    report = convert(source, tmp_path / "out")
    for file in FILES:
        parts = [c for c in report.components if c.file == file]
        entries = read_header(tmp_path / "out" / file).entries
        assert sum(c.tensors for c in parts) == len(entries)
        assert sum(c.parameters for c in parts) == sum(e.size for e in entries.values())
        assert sum(c.nbytes for c in parts) == sum(e.nbytes for e in entries.values())
    assert {c.name for c in report.components} == {label for _, label in COMPONENTS}
    sizes = {file: read_header(tmp_path / "out" / file) for file in FILES}
    data = {file: header.nbytes - header.data_start for file, header in sizes.items()}
    assert report.speaking_bytes == data[MODEL] + data[DECODER]
    assert report.parameters * 2 == sum(data.values())

    lines = format_report(report).splitlines()
    assert len({len(line) for line in lines[: len(report.components) + 6]}) == 1
    named = {line.split("  ")[0]: line.split() for line in lines}
    assert named[MODEL][-1] == f"{data[MODEL] / 1e6:.1f}"
    assert named["needed to speak"][-2] == f"{report.speaking_bytes // 2:,}"
    assert named["with voice registration"][-2] == f"{report.parameters:,}"
    assert named[ENCODER][-3] == str(len(sizes[ENCODER].entries))
    assert lines[-1] == "dropped 1 (RoPE table, computed at load): quantizer.freqs_cis"


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    seen: list[tuple[str, int, int]] = []
    report = convert(source, tmp_path / "out", progress=lambda *step: seen.append(step))
    total = sum(c.nbytes for c in report.components)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert {whole for _, _, whole in seen} == {total}
    assert seen[-1][1] == total
    assert len({name for name, _, _ in seen}) == sum(c.tensors for c in report.components)


def test_importing_is_light() -> None:
    heavy = "mlx", "torch", "tokenizers", "safetensors", "huggingface_hub"
    code = (
        "import sys, warble_mlx.convert, warble_mlx.inspect_bundle;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
