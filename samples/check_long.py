"""Was a long text read completely, in order, and nothing twice? By an offline recogniser.

    pip install ".[dev]" && pip install -r tests/ear/requirements.txt
    warble -f tests/cases/texts/long_75_markers.txt --seed 1 -o long.wav --json > long.json
    python samples/check_long.py tests/cases/texts/long_75_markers.txt long.wav long.json

Lets Whisper tiny.en read the audio, aligns what it wrote with the sentences of the text, and looks
at the pieces: each ended by itself, at a speed at which people speak, and together they are the
text. The exit status is 0 if all that holds and four sentences of five are heard.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import soundfile

from warble_mlx.splitting import sentences
from warble_mlx.text import clean

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from ear.alignment import align  # noqa: E402
from ear.recogniser import Recogniser, why_missing  # noqa: E402

SPEEDS = (8.0, 25.0)  # characters per second
WANTED_SHARE = 0.8
LEAST_NAMED = 0.2  # in the wrong order it is next to nothing


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("audio", type=Path)
    parser.add_argument("facts", type=Path, help="what --json printed")
    options = parser.parse_args()
    missing = why_missing()
    if missing:
        parser.error(missing)
    text = clean(options.text.read_text(encoding="utf-8-sig"))
    facts = json.loads(options.facts.read_text(encoding="utf-8"))
    pieces, rate = facts["pieces"], facts["sample_rate"]
    stopped = sum(piece["finish_reason"] == "stop" for piece in pieces)
    speeds = np.array([len(p["text"]) * rate / (p["samples"][1] - p["samples"][0]) for p in pieces])
    plausible = int(((speeds >= SPEEDS[0]) & (speeds <= SPEEDS[1])).sum())
    joined = "".join("".join(p["text"] for p in pieces).split()) == "".join(text.split())
    samples, rate = soundfile.read(options.audio, dtype="float32")
    # Piece by piece, as a recogniser of 30 s windows loses its place in ten minutes of sound.
    recogniser = Recogniser()
    heard = " ".join(
        recogniser.read(samples[begin:end], rate) for begin, end in (p["samples"] for p in pieces)
    )
    wanted = sentences(text)
    found = align(wanted, heard)
    print(
        f"{len(pieces)} pieces, {stopped} ended by themselves, {plausible} at {SPEEDS[0]:.0f} to"
        f" {SPEEDS[1]:.0f} characters a second ({speeds.min():.1f} to {speeds.max():.1f})\n"
        f"the pieces joined are {'' if joined else 'NOT '}the text\n"
        f"{found.heard} of {len(wanted)} sentences heard in order, and {found.named:.0%} of the"
        f" words that tell them apart\nheard twice, or babble beside:"
        f" {', '.join(wanted[i] for i in found.swollen) or 'none'}"
    )
    sound = (
        stopped == plausible == len(pieces)
        and joined
        and not found.swollen
        and found.named > LEAST_NAMED
    )
    return 0 if sound and found.heard >= WANTED_SHARE * len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
