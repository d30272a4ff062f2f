"""The codes that `warble doctor` holds its test sentence against.

    cd tests
    python -m reference.golden_sentence ../warble_mlx/bundled ../warble_mlx/bundled/self_test.json

To be run again for another bundled voice pack. Greedy, float32, the pack's default voice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from reference.dump import open_engine
from warble_mlx.doctor import TEST_TEXT
from warble_mlx.voices import read_voices

MOST_FRAMES = 200


def golden_sentence(folder: Path) -> dict[str, Any]:
    """Text, voice and codes [10][frames]."""
    engine = open_engine(folder)
    voice = read_voices(folder).default_voice
    token = voice.token if voice else ""
    columns = engine.prompt(token + TEST_TEXT, None, None)
    result, _ = engine.run([columns], MOST_FRAMES, None, None)
    if not result.finished[0]:
        raise SystemExit(f"no end within {MOST_FRAMES} frames")
    codes = result.codes[0, :, : result.lengths[0]].tolist()
    return {"text": TEST_TEXT, "voice": voice.name if voice else None, "codes": codes}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(json.dumps(golden_sentence(args.bundle)) + "\n")


if __name__ == "__main__":
    main()
