"""Several streams at once: aggregate speed of 1, 2, 4, 8 and 16 rows, and the ratio to one.

    python samples/benchmarks/streams.py --synthetic full --bits 4 --json streams.json
    python samples/benchmarks/streams.py -m ./bundle --rows 1,4

Every row generates as many frames; rows step together, so that a step reads the weights once for
all of them. No codec: the two transformers alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

from warble_mlx.backend import prepare

prepare()

import msgspec  # noqa: E402

from warble_mlx.bench import bundle_subject, synthetic_subject  # noqa: E402
from warble_mlx.bench.generation import time_generation  # noqa: E402
from warble_mlx.bench.machine import this_command, this_machine  # noqa: E402


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-m", "--model", help="bundle folder or hub id (default: bundled)")
    what.add_argument("--synthetic", choices=("full", "tiny"))
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16], metavar="1,2,…")
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.synthetic:
        subject = synthetic_subject(options.synthetic, bits=options.bits, dtype=options.dtype)
    else:
        subject = bundle_subject(options.model, dtype=options.dtype)
    found = []
    for rows in options.rows:
        print(f"{rows} rows …", file=sys.stderr)
        found.append(
            time_generation(
                subject.engine,
                lambda seed: subject.request(seed, options.frames),
                frame_rate_hz=subject.config.frame_rate_hz,
                rows=rows,
                runs=options.runs,
                warmup=1,
            )
        )
    machine = this_machine()
    print(f"{subject.name}, {subject.dtype}, {machine.device}, mlx {machine.mlx}\n")
    print("| rows | ms per step | frames/s | aggregate RTF | over the first line |")
    print("| --- | --- | --- | --- | --- |")
    for g in found:
        gain = g.frames_per_s / found[0].frames_per_s
        print(
            f"| {g.rows} | {g.ms_per_step:.2f} | {g.frames_per_s:,.1f} | {g.rtf:.4f} |"
            f" {gain:.2f}x |"
        )
    if options.json:
        document = {
            "schema": "warble-streams/1",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": this_command(),
            "machine": msgspec.to_builtins(machine),
            "model": subject.name,
            "sha256": subject.fingerprint,
            "dtype": subject.dtype,
            "streams": msgspec.to_builtins(found),
        }
        options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
