"""What streaming costs and how soon it is heard.

    python samples/measure_stream.py
    python samples/measure_stream.py ./bundle --runs 11

Prints the time from the call to the first chunk with the model loaded, and from the command line
`warble … --raw` to the first byte on stdout, with Python's start and the loading of the model:
median, least and most of several runs. And how many multiply-adds the codec needs for 30 s in the
chunks of a stream, against one piece.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from warble_mlx.backend import prepare

prepare()  # before the first import of MLX, or OpenBLAS comes too late

import mlx.core as mx  # noqa: E402

from warble_mlx import Warble, WarbleError, load  # noqa: E402
from warble_mlx.reading import FIRST_CHUNK, NEXT_CHUNK  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from products import counted  # noqa: E402

TEXT = "The first sound should come long before the last word of this sentence is thought of."
SECONDS = 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="bundle folder or hub id (default: bundled)")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    try:
        warble = load(options.model)
    except WarbleError as error:
        parser.error(str(error))
    next(warble.stream("Warm up.", seed=0))
    show("first chunk, model loaded", [called(warble, seed) for seed in range(options.runs)])
    model = ["-m", options.model] if options.model else []
    line = [sys.executable, "-m", "warble_mlx", "say", TEXT, "--raw", "--seed", "0", *model]
    show("first byte, from the shell", [from_the_shell(line) for _ in range(options.runs)])
    frames = round(SECONDS * warble.config.frame_rate_hz)
    whole = products(warble, [frames])
    chunks = [FIRST_CHUNK] + [NEXT_CHUNK] * ((frames - FIRST_CHUNK) // NEXT_CHUNK)
    streamed = products(warble, [*chunks, frames - sum(chunks)])
    print(
        f"codec, {SECONDS} s: {whole / 1e9:.2f} GMAC in one piece, {streamed / 1e9:.2f} in the"
        f" chunks of a stream ({100 * (streamed / whole - 1):+.2f} %)"
    )
    return 0


def show(what: str, seconds: list[float]) -> None:
    least, most = min(seconds), max(seconds)
    print(
        f"{what}: {statistics.median(seconds) * 1000:.0f} ms"
        f" ({least * 1000:.0f} to {most * 1000:.0f}, {len(seconds)} runs)"
    )


def called(warble: Warble, seed: int) -> float:
    """Seconds from the call to the first chunk, 0.19 s of sound."""
    begin = time.perf_counter()
    with warble.stream(TEXT, seed=seed) as stream:
        next(stream)
        return time.perf_counter() - begin


def from_the_shell(line: list[str]) -> float:
    """Seconds from the start of the process to its first byte."""
    begin = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout
        running.stdout.read(1)
        took = time.perf_counter() - begin
        running.kill()
    return took


def products(warble: Warble, chunks: list[int]) -> int:
    """Multiply-adds of decoding chunks of so many frames, nothing of which is computed."""
    decoder = warble._decoder
    state = decoder.initial_state(1)
    with counted() as tally:
        for frames in chunks:
            if frames:
                _, state = decoder.step(mx.zeros((1, 10, frames), dtype=mx.int32), state)
    return tally.total


if __name__ == "__main__":
    sys.exit(main())
