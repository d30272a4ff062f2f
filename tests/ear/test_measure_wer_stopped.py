"""samples/measure_wer.py when it is stopped, and started again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ear.recogniser import Recogniser

from warble_mlx import Warble

SCRIPT = Path(__file__).parents[2] / "samples" / "measure_wer.py"
HELD_OUT = Path(__file__).with_name("heldout.txt")


@pytest.mark.ear
def test_a_run_that_was_stopped_goes_on(
    recogniser: Recogniser, bundled: Warble, tmp_path: Path
) -> None:
    out, journal = tmp_path / "result.json", tmp_path / "result.json.unfinished.jsonl"
    command = [sys.executable, SCRIPT, "--sentences", "4", "--voices", "1,2", "--json", out]
    with subprocess.Popen(
        [*command, "--jobs", "1", "--rows", "2"], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (journal.exists() and journal.read_text("utf-8").count("\n") > 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert "unmeasured" in process.stderr.read()
    partial = json.loads(out.read_text())
    assert partial["unmeasured"] == 8 - len(partial["utterances"]) > 0

    # A row from before is taken as it is.
    head, first, *rest = journal.read_text("utf-8").splitlines()
    first = json.dumps({**json.loads(first), "errors": 77})
    journal.write_text("\n".join([head, first, *rest, ""]), "utf-8")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = json.loads(out.read_text())
    assert whole["unmeasured"] == 0
    assert [(row["text"], row["voice"]) for row in whole["utterances"]] == [
        (text, voice.name)
        for text in HELD_OUT.read_text("utf-8").splitlines()[:4]
        for voice in bundled.voices[:2]
    ]
    assert [row["errors"] for row in whole["utterances"]].count(77) == 1
    assert not journal.exists()
