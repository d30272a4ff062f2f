"""The figures behind the limits of warble_mlx/health.py, from streams of a model that speaks well.

    python samples/measure_health.py
    python samples/measure_health.py ./bundle --streams kept.npz

Speaks held-out sentences (tests/ear/heldout.txt) and texts of one to three words in every voice,
sampled, greedy and hot; prints per statistic its worst value among them and the limit, and the
false alarms by reason. Every third stream is decoded, too. About ten minutes on two cores;
--streams keeps the codes, or reads them when the file is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warble_mlx.backend import prepare

prepare()  # before the first import of MLX, or OpenBLAS comes too late

import mlx.core as mx  # noqa: E402

from warble_mlx import Warble, WarbleError, health, load  # noqa: E402
from warble_mlx.codec import CodecDecoder  # noqa: E402
from warble_mlx.engine import Request, Sampling  # noqa: E402
from warble_mlx.errors import SickError  # noqa: E402
from warble_mlx.prompt import PromptBuilder  # noqa: E402
from warble_mlx.weights import DECODER_FILE, load_strictly  # noqa: E402

HELD_OUT = Path(__file__).resolve().parent.parent / "tests" / "ear" / "heldout.txt"
SHORT = ["Hi", "Yes.", "Bye", "No", "Hello there.", "Good morning.", "Stop!", "Thank you",
         "One two three.", "A"]  # fmt: skip
ROWS = 16  # streams at a time
MOST_FRAMES = 400


class Case(NamedTuple):
    """One stream to make."""

    text: str
    voice: str
    seed: int
    temperature: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="bundle folder or hub id (default: bundled)")
    parser.add_argument("--streams", type=Path, metavar="NPZ", help="keep the codes there")
    options = parser.parse_args()
    try:
        warble = load(options.model)
    except WarbleError as error:
        parser.error(str(error))
    if options.streams and options.streams.is_file():
        streams = read(options.streams)
    else:
        streams = list(generated(warble, cases([v.name for v in warble.voices])))
        if options.streams:
            write(options.streams, streams)
    print(report(warble, streams))
    return 0


def cases(voices: list[str]) -> list[Case]:
    """720 streams for five voices."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    found = []
    for i, voice in enumerate(voices):
        found += [Case(lines[(k + 24 * i) % len(lines)], voice, 1, 0.7) for k in range(60)]
        found += [Case(text, voice, seed, 0.7) for text in SHORT for seed in range(10, 16)]
        found += [Case(lines[(9 * k + i) % len(lines)], voice, 2, 0.0) for k in range(12)]
        found += [Case(lines[(9 * k + i + 4) % len(lines)], voice, 3, 1.0) for k in range(12)]
    return found


Stream = tuple[Case, npt.NDArray[np.int32], str]


def generated(warble: Warble, wanted: list[Case]) -> Iterator[Stream]:
    """Every case with its codes [10, frames] and how it ended; progress on stderr."""
    # Texts of one length side by side, and greedy ones apart, for which there is another step.
    order = sorted(wanted, key=lambda case: (case.temperature == 0, len(case.text)))
    done = 0
    for greedy in (False, True):
        group = [case for case in order if (case.temperature == 0) is greedy]
        frames: list[list[npt.NDArray[np.int32]]] = [[] for _ in group]
        prompts = PromptBuilder.from_folder(warble.folder, warble.config)
        requests = [request(warble, prompts, case) for case in group]
        for emission in warble.engine.generate(requests, rows=ROWS):
            if emission.codes is not None:
                frames[emission.request].append(emission.codes)
            if emission.finish_reason is not None:
                own, done = frames[emission.request], done + 1
                codes = np.array(own, np.int32).reshape(len(own), -1).T
                yield group[emission.request], codes, emission.finish_reason
                print(f"\r{done} of {len(wanted)} streams", end="", file=sys.stderr)
    print(file=sys.stderr)


def request(warble: Warble, prompts: PromptBuilder, case: Case) -> Request:
    token = next(v.token for v in warble.voices if v.name == case.voice)
    prompt = prompts.build(case.text, speaker=token)
    chosen = Sampling(case.temperature, warble.defaults.top_p, warble.defaults.top_k)
    return Request(prompt, MOST_FRAMES, chosen, case.seed)


def write(path: Path, streams: list[Stream]) -> None:
    arrays: dict[str, Any] = {str(i): codes for i, (_, codes, _) in enumerate(streams)}
    heads = json.dumps([[*case, reason] for case, _, reason in streams])
    np.savez_compressed(path, heads=np.array(heads), **arrays)


def read(path: Path) -> list[Stream]:
    with np.load(path) as kept:
        heads = json.loads(str(kept["heads"]))
        return [(Case(*head[:4]), kept[str(i)], head[4]) for i, head in enumerate(heads)]


def report(warble: Warble, streams: list[Stream]) -> str:
    """A Markdown table of statistics, then the false alarms."""
    rate = warble.config.frame_rate_hz
    decoder = CodecDecoder(warble.config)
    load_strictly(decoder, warble.folder / DECODER_FILE, mx.float32, {})
    worst: dict[str, list[float]] = {}
    alarms: Counter[str] = Counter()
    decoded = 0
    for i, (case, codes, reason) in enumerate(streams):
        for name, value in code_statistics(codes, case.text, rate):
            worst.setdefault(name, []).append(value)
        try:
            sizes = [warble.config.codebook_size] * len(codes)
            health.check_codes(codes, sizes, case.text, rate)
        except SickError as error:
            alarms[error.reason] += 1
            print(f"{case}: {error}", file=sys.stderr)
        alarms["codes that did not end by themselves"] += reason != "stop"
        if i % 3 or not codes.size:
            continue
        decoded += 1
        wave = np.array(decoder.decode(mx.array(codes)[None])[0])
        for name, value in wave_statistics(wave, warble.sample_rate):
            worst.setdefault(name, []).append(value)
        try:
            health.check_waveform(wave, warble.sample_rate, case.text)
        except SickError as error:
            alarms[f"{error.reason} (samples)"] += 1
            print(f"{case}: {error}", file=sys.stderr)
    lines = ["| statistic | least | 1 % | median | 99 % | most | limit |", "|---" * 7 + "|"]
    for name, values in worst.items():
        points = np.quantile(values, [0, 0.01, 0.5, 0.99, 1])
        shown = " | ".join(f"{point:.3g}" for point in points)
        lines.append(f"| {name} | {shown} | {LIMITS[name]} |")
    told = ", ".join(f"{count} {name}" for name, count in alarms.items() if count) or "none"
    lines.append(f"\n{len(streams)} streams, {decoded} decoded. False alarms: {told}.")
    return "\n".join(lines)


LIMITS = {
    "frames equal to the one 1 to 8 earlier, in a row": f"at most {health.LONGEST_REPEAT - 1}",
    "frames with one code in a codebook": f"at most {health.LONGEST_CONSTANT}",
    f"codes of a book per {health.WINDOW} frames": f"at least {health.LEAST_DISTINCT}",
    f"frames that differ per {health.WINDOW}": f"at least {health.LEAST_DISTINCT_FRAMES}",
    "length / shortest expected": "at least 1",
    "length / longest expected": "at most 1",
    "peak, of full scale": f"at least {health.SILENT_PEAK:.3g}",
    "share at full scale": f"at most {health.MOST_CLIPPED}",
    "mean, of full scale": f"at most {health.MOST_OFFSET}",
    "steady end, s": f"at most {health.LONGEST_STEADY}",
    "silent end, s": f"at most {health.LONGEST_SILENT_END}",
    "clicks": "none at joints",
}


def code_statistics(
    codes: npt.NDArray[np.int32], text: str, rate: float
) -> Iterator[tuple[str, float]]:
    """The worst of each statistic within one stream."""
    names = iter(LIMITS)
    count = codes.shape[1]
    repeats = 0
    for period in range(1, min(health.LONGEST_PERIOD, count - 1) + 1):
        same = (codes[:, period:] == codes[:, :-period]).all(axis=0)
        repeats = max(repeats, longest(same))
    yield next(names), repeats
    constant = [longest(row[1:] == row[:-1]) + 1 for row in codes] if count else [0]
    yield next(names), max(constant)
    books, frames = next(names), next(names)
    for end in range(health.SETTLED, count + 1):
        window = codes[:, max(end - health.WINDOW, 0) : end]
        share = health.WINDOW / window.shape[1]
        yield books, share * min(len(set(row)) for row in window.tolist())
        yield frames, share * len(set(zip(*window.tolist(), strict=True)))
    seconds, expected = count / rate, health.expected_seconds(text)
    yield next(names), seconds / expected.least
    yield next(names), seconds / expected.most


def wave_statistics(wave: npt.NDArray[np.float32], rate: int) -> Iterator[tuple[str, float]]:
    names = list(LIMITS)[6:]
    values = [
        float(np.abs(wave).max()),
        float(np.mean(np.abs(wave) >= health.FULL_SCALE)),
        abs(float(wave.mean(dtype=np.float64))),
        health.steady_end(wave, rate),
        health.silent_end(wave, rate),
        len(health.clicks(wave, rate)),
    ]
    yield from zip(names, values, strict=True)


def longest(flags: npt.NDArray[np.bool_]) -> int:
    """The longest run of true ones."""
    edges = np.flatnonzero(~np.concatenate([[False], flags, [False]]))
    return int(np.diff(edges).max()) - 1


if __name__ == "__main__":
    sys.exit(main())
