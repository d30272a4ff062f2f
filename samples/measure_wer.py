"""How well a model is understood: word error rate by an offline recogniser, voice by voice.

    pip install ".[dev]" && pip install -r tests/ear/requirements.txt
    python samples/measure_wer.py --greedy
    python samples/measure_wer.py ./bundle --voices 2,5 --seeds 1,2,3 --json t07.json
    python samples/measure_wer.py ./bundle-4bit --greedy --against bf16.json

Speaks held-out sentences (tests/ear/heldout.txt), lets Whisper tiny.en read them, and prints per
voice: word errors over words with a 95 % bootstrap interval, how many utterances ended by
themselves, and the 5th and 95th percentile of their length over that which a straight line
through the voice's lengths gives for so many characters. With --against, an earlier result, it
also prints paired differences: judge those, absolute figures on short sentences are coarse.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from warble_mlx import Warble, WarbleError, health, load

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from ear.recogniser import Recogniser, why_missing  # noqa: E402
from ear.scoring import WordErrors, difference_interval, interval, rate, word_errors  # noqa: E402

HELD_OUT = TESTS / "ear" / "heldout.txt"

Row = dict[str, Any]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="bundle folder or hub id (default: bundled)")
    parser.add_argument("--voices", help="names or numbers, comma between (default: all)")
    parser.add_argument("--sentences", default="20", metavar="N|all",
                        help="20: every second one of the first 40 (171 words); other N: the"
                             " first N; all: 108 (846 words)")  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true")
    how.add_argument("--temperature", type=float, help="default: the model's own")
    parser.add_argument("--seeds", type=numbers, default=[1], metavar="1,2,…")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every utterance there")
    parser.add_argument("--against", type=Path, metavar="JSON", help="an earlier result")
    options = parser.parse_args()
    missing = why_missing()
    if missing:
        parser.error(missing)
    try:
        warble = load(options.model)
    except WarbleError as error:
        parser.error(str(error))
    sentences = chosen(options.sentences)
    voices = options.voices.split(",") if options.voices else [v.name for v in warble.voices]
    settings: Row = {"greedy": options.greedy, "temperature": options.temperature}
    seeds = options.seeds[:1] if options.greedy else options.seeds
    rows = list(measured(warble, voices or [None], sentences, seeds, settings))
    for row, cut in zip(
        rows, health.check_durations(rows, 1 / warble.config.frame_rate_hz), strict=True
    ):
        if cut:
            print(f"{row['voice']}, seed {row['seed']}, {row['text']!r}: {cut}", file=sys.stderr)
    if options.json:
        document = {"model": warble.name, **settings, "seeds": seeds, "utterances": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    earlier = json.loads(options.against.read_text())["utterances"] if options.against else None
    print(table(rows, earlier))
    return 0


def chosen(wanted: str) -> list[str]:
    """The sentences to speak; see --sentences."""
    everything = HELD_OUT.read_text(encoding="utf-8").splitlines()
    if wanted == "20":
        return everything[:40:2]
    return everything if wanted == "all" else everything[: int(wanted)]


def measured(
    warble: Warble,
    voices: Iterable[str | None],
    sentences: list[str],
    seeds: list[int],
    settings: Row,
) -> Iterable[Row]:
    """Speak and read every sentence in every voice with every seed; progress on stderr."""
    recogniser = Recogniser()
    for voice in voices:
        known = int(voice) if voice and voice.isdigit() else voice
        started, errors, total = time.perf_counter(), 0, 0
        for seed in seeds:
            for sentence in sentences:
                speech = warble.say(sentence, voice=known, seed=seed, **settings)
                heard = recogniser.read(speech.samples, speech.sample_rate)
                found = word_errors(sentence, heard)
                errors, total = errors + found.errors, total + found.words
                yield {
                    "voice": speech.voice,
                    "seed": seed,
                    "text": sentence,
                    "heard": heard,
                    "errors": found.errors,
                    "words": found.words,
                    "seconds": round(speech.seconds, 3),
                    "finish_reason": speech.finish_reason,
                }
                print(
                    f"\r{speech.voice or 'no voice'}: {errors} of {total} words wrong,"
                    f" {time.perf_counter() - started:.0f} s",
                    end="",
                    file=sys.stderr,
                )
        print(file=sys.stderr)


def table(rows: list[Row], earlier: list[Row] | None) -> str:
    """A Markdown table, one line per voice and one for all."""
    head = ["voice", "errors / words", "WER", "95 %", "ended", "length, 5 % … 95 %"]
    if earlier is not None:
        head += ["WER - earlier, points", "length / earlier, 5 % … 95 %"]
    lines = [head, ["---"] * len(head)]
    voices = list(dict.fromkeys(row["voice"] for row in rows))
    for voice in [*voices, *(["all"] if len(voices) > 1 else [])]:
        own = [row for row in rows if voice in (row["voice"], "all")]
        scores = scores_of(own)
        low, high = interval(scores)
        ended = sum(row["finish_reason"] == "stop" for row in own)
        line = [
            str(voice or "none"),
            f"{sum(s.errors for s in scores)} / {sum(s.words for s in scores)}",
            f"{rate(scores):.1%}",
            f"{low:.1%} … {high:.1%}",
            f"{ended} of {len(own)}",
            spread(
                [ratio for v in voices for ratio in ratios([r for r in own if r["voice"] == v])]
            ),
        ]
        if earlier is not None:
            line += paired(own, earlier)
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scores_of(rows: list[Row]) -> list[WordErrors]:
    return [WordErrors(row["errors"], row["words"]) for row in rows]


def ratios(rows: list[Row]) -> list[float]:
    """Length of each utterance over what the line through its voice's lengths gives."""
    found = []
    for voice in {row["voice"] for row in rows}:
        own = [row for row in rows if row["voice"] == voice]
        characters = np.array([len(row["text"]) for row in own])
        seconds = np.array([row["seconds"] for row in own])
        if len(set(characters.tolist())) > 2:
            slope, start = np.polyfit(characters, seconds, 1)
            found += (seconds / (start + slope * characters)).tolist()
    return found


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = np.quantile(values, [0.05, 0.95])
    return f"{low:.2f} … {high:.2f}"


def paired(rows: list[Row], earlier: list[Row]) -> list[str]:
    """Difference to the same voice, seed and sentence of an earlier result."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["voice"], row["seed"], row["text"]

    before = {key(row): row for row in earlier}
    pairs = [(before[key(row)], row) for row in rows if key(row) in before]
    if not pairs:
        return ["-", "-"]
    old, new = (scores_of([pair[i] for pair in pairs]) for i in (0, 1))
    low, high = difference_interval(old, new)
    points = f"{100 * (rate(new) - rate(old)):+.1f} ({100 * low:+.1f} … {100 * high:+.1f})"
    return [points, spread([b["seconds"] / a["seconds"] for a, b in pairs if a["seconds"]])]


if __name__ == "__main__":
    sys.exit(main())
