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

A run that is stopped (Ctrl-C, SIGTERM) prints and writes what it has; the same command with the
same --json goes on from there, by OUT.unfinished.jsonl beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from warble_mlx import Warble, WarbleError, health, load
from warble_mlx.backend import on_gpu
from warble_mlx.batch.ledger import file_digest

SAMPLES = Path(__file__).resolve().parent
sys.path += [str(SAMPLES), str(SAMPLES.parent / "tests")]

from ear.recogniser import why_missing  # noqa: E402
from ear.scoring import WordErrors, difference_interval, interval, rate  # noqa: E402
from hearing import ROWS, Journal, Row, Utterance, in_processes, key  # noqa: E402

HELD_OUT = SAMPLES.parent / "tests" / "ear" / "heldout.txt"
STOPPED = 130


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


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
    parser.add_argument("--jobs", type=positive, metavar="N",
                        help="processes of one thread each (default: one per core, on a GPU one)"
                        )  # fmt: skip
    parser.add_argument("--rows", type=positive, default=ROWS, metavar="N",
                        help="utterances that step together in each (default: %(default)s)"
                        )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every utterance there")
    parser.add_argument("--against", type=Path, metavar="JSON", help="an earlier result")
    options = parser.parse_args()
    missing = why_missing()
    if missing:
        parser.error(missing)
    earlier = json.loads(options.against.read_text())["utterances"] if options.against else None
    settings: Row = {"greedy": options.greedy, "temperature": options.temperature}
    seeds = options.seeds[:1] if options.greedy else options.seeds
    try:
        warble = load(options.model)
        utterances = wanted(warble, options.voices, chosen(options.sentences), seeds)
        journal = None
        if options.json:
            unfinished = options.json.with_name(options.json.name + ".unfinished.jsonl")
            journal = Journal(unfinished, subject(warble, settings))
        rows = measured(
            options.model,
            utterances,
            journal,
            jobs=options.jobs or (1 if on_gpu() else os.cpu_count() or 1),
            rows=options.rows,
            **settings,
        )
    except WarbleError as error:
        parser.error(str(error))
    for row, cut in zip(
        rows, health.check_durations(rows, 1 / warble.config.frame_rate_hz), strict=True
    ):
        if cut:
            print(f"{row['voice']}, seed {row['seed']}, {row['text']!r}: {cut}", file=sys.stderr)
    left = len(utterances) - len(rows)
    if options.json:
        document = {"model": warble.name, **settings, "seeds": seeds, "unmeasured": left,
                    "utterances": rows}  # fmt: skip
        written = options.json.with_name(options.json.name + ".new")
        written.write_text(json.dumps(document, indent=1) + "\n")
        written.replace(options.json)
    if rows:
        print(table(rows, earlier))
    if left:
        print(f"stopped with {left} of {len(utterances)} utterances unmeasured", file=sys.stderr)
        return STOPPED
    if journal:
        journal.remove()
    return 0


def chosen(sentences: str) -> list[str]:
    """The sentences to speak; see --sentences."""
    everything = HELD_OUT.read_text(encoding="utf-8").splitlines()
    if sentences == "20":
        return everything[:40:2]
    return everything if sentences == "all" else everything[: int(sentences)]


def wanted(
    warble: Warble, voices: str | None, sentences: list[str], seeds: list[int]
) -> list[Utterance]:
    """Every sentence in every voice with every seed. Voice by voice inside a sentence, seed by
    seed outside, so that a run that was stopped has measured all voices alike.

    Raises WarbleError for a voice that the model does not have.
    """
    names: list[str | None] = [voice.name for voice in warble.voices] or [None]
    if voices:
        asked = [int(v) if v.isdigit() else v for v in voices.split(",")]
        names = [warble.plan("a", voice=voice).voice for voice in asked]
    return [
        Utterance(name, seed, sentence)
        for seed in seeds
        for sentence in sentences
        for name in names
    ]


def subject(warble: Warble, settings: Row) -> Row:
    """What decides on the results, beside the utterances."""
    files = {
        path.name: file_digest(path)
        for path in sorted(warble.folder.iterdir())
        if path.suffix in (".safetensors", ".json")
    }
    return {"files": files, "dtype": warble.dtype, **settings}


def measured(
    model: str | None,
    utterances: list[Utterance],
    journal: Journal | None,
    **options: Any,
) -> list[Row]:
    """The results of all utterances in their order, or of those that there was time for; progress
    on stderr."""
    done = {key(row): row for row in (journal.rows if journal else ())}
    todo = [utterance for utterance in utterances if utterance not in done]
    bar = tqdm(total=len(utterances), initial=len(utterances) - len(todo), unit=" utterances")
    with bar, stoppable(), contextlib.suppress(KeyboardInterrupt):
        errors = total = 0
        for row in in_processes(model, todo, **options):
            done[key(row)] = row
            if journal:
                journal.add(row)
            errors, total = errors + row["errors"], total + row["words"]
            bar.set_postfix_str(f"{errors} of {total} words wrong", refresh=False)
            bar.update()
    return [done[utterance] for utterance in utterances if utterance in done]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
