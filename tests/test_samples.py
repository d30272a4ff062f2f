"""The scripts that people run first do run, as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


@pytest.mark.parametrize(
    ("script", "written"),
    [("say.py", ["say.wav"]), ("stream.py", []), ("clone.py", ["clip.wav", "clone.wav"])],
)
def test_a_sample_runs(script: str, written: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SAMPLES / script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for name in written:
        assert soundfile.info(tmp_path / name).duration > 0.5


def test_the_readme_python_runs(tmp_path: Path) -> None:
    """The block of README.md, word for word."""
    readme = (SAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (block,) = [b.split("```")[0] for b in readme.split("```python\n")[1:]]
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hello.wav").is_file()
