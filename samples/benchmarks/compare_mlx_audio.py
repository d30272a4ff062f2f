"""This runtime against mlx-audio's arktts: the same machine, process, weights and frames.

    pip install "warble-mlx" mlx-audio
    python samples/benchmarks/compare_mlx_audio.py --json compare.json
    python samples/benchmarks/compare_mlx_audio.py --synthetic tiny --frames 12 --repeats 2

Both sides get the same random weights of the published size, by name, in bfloat16 on a GPU and
float32 on a CPU, then packed to 4 bits: both by our policy (transformer blocks), and mlx-audio once
more by its own recipe, as far as that runs. The row of EOS is zero in both, so that neither ever
ends early. Batch 1, the published sampling settings.

Times are medians over repeats that alternate between the sides. A frame's time is the difference
between a long and a short run over the difference in frames, so that prompts fall out. Greedy codes
are compared first: they show that both compute the same model.

Kernels per frame are counted from the CUDA graphs that MLX launches, for both sides alike, in
processes of their own; elsewhere there are only primitives.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from warble_mlx.backend import on_gpu, prepare

prepare()

import mlx.core as mx  # noqa: E402
import mlx_audio_side as theirs  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from warble_mlx.bench.cost import frame_reads, total_bytes  # noqa: E402
from warble_mlx.bench.cuda_graphs import launched_per_frame, saving_to  # noqa: E402
from warble_mlx.bench.graph import cache_slots, step_primitives, unfused_primitives  # noqa: E402
from warble_mlx.bench.machine import this_command, this_machine  # noqa: E402
from warble_mlx.bench.subject import dtype_named, synthetic_prompt  # noqa: E402
from warble_mlx.bench.synthetic import (  # noqa: E402
    GEOMETRIES,
    cast,
    dequantize,
    quantize_blocks,
    random_dual_ar,
)
from warble_mlx.engine import Engine, Request, Sampling  # noqa: E402
from warble_mlx.prompt import Prompt  # noqa: E402
from warble_mlx.quant.policy import packing  # noqa: E402

GREEDY_FRAMES = 8
COUNTED_FRAMES = (4, 12)  # of the two runs whose difference gives kernels per frame

Row = dict[str, Any]


class Case(NamedTuple):
    """One line of the table. `recipe`: how mlx-audio's side is packed; ours: by our policy."""

    name: str
    bits: int
    recipe: str = theirs.OURS


CASES = (
    Case("16-bit", 16),
    Case("4-bit, both by our policy", 4),
    Case("4-bit, each by its own recipe", 4, theirs.THEIRS),
)


class Sides(NamedTuple):
    """Both models of a case, ready to run."""

    engine: Engine
    other: Any
    prompt: Prompt
    dtype: mx.Dtype

    def ours(self, frames: int, seed: int = 0, *, greedy: bool = False) -> np.ndarray:
        sampling = Sampling(temperature=0) if greedy else Sampling()
        request = Request(self.prompt, frames, sampling, seed)
        emissions = self.engine.generate([request])
        return np.stack([e.codes for e in emissions if e.codes is not None], axis=1)

    def theirs(self, frames: int, seed: int = 0, *, greedy: bool = False) -> np.ndarray:
        return theirs.generate(self.other, self.prompt, frames, seed=seed, greedy=greedy)


def sides(size: str, case: Case, dtype: mx.Dtype, which: str = "both") -> Sides:
    """Build the models of a case; `which` leaves one of them out, to save memory."""
    config = GEOMETRIES[size]  # type: ignore[index]
    model = random_dual_ar(config)
    other = None
    if which != "ours":
        other = theirs.build(model)
        if case.bits < 16:
            theirs.quantize(other, case.recipe)
        theirs.cast(other, dtype)
    if case.bits < 16:
        quantize_blocks(model, packing(case.bits))
        if not on_gpu():
            dequantize(model, dtype)  # as the runtime does on a CPU
    cast(model, dtype)
    mx.eval(model.parameters())
    model.prepare(dtype)
    return Sides(Engine(model, compiled=on_gpu()), other, synthetic_prompt(config), dtype)


def seconds(run: Callable[[int, int], object], frames: int, seed: int) -> float:
    begin = time.perf_counter()
    run(frames, seed)
    return time.perf_counter() - begin


def timed(pair: Sides, frames: int, short: int, repeats: int) -> dict[str, Row]:
    """Milliseconds per frame of both sides, and peak memory."""
    runs = {"ours": pair.ours, "theirs": pair.theirs}
    whole: dict[str, list[float]] = {name: [] for name in runs}
    brief: dict[str, list[float]] = {name: [] for name in runs}
    peak = {}
    for name, run in runs.items():
        run(frames)  # warm up: compile, allocate
        mx.synchronize()
        mx.reset_peak_memory()
        run(frames)
        peak[name] = mx.get_peak_memory()
    for seed in range(repeats):
        for name, run in runs.items():
            whole[name].append(seconds(run, frames, seed))
            brief[name].append(seconds(run, short, seed))
    found = {}
    for name in runs:
        long, little = statistics.median(whole[name]), statistics.median(brief[name])
        found[name] = {
            "ms_per_frame": 1e3 * (long - little) / (frames - short),
            "ms_per_frame_with_prompt": 1e3 * long / frames,
            "seconds": whole[name],
            "seconds_short": brief[name],
            # Both models are loaded while either runs.
            "peak_memory_bytes_both_loaded": peak[name],
        }
    return found


def agreement(pair: Sides) -> str:
    ours, other = (run(GREEDY_FRAMES, greedy=True) for run in (pair.ours, pair.theirs))
    return f"{(ours == other).sum()} of {ours.size}"


def kernels(options: argparse.Namespace, index: int, which: str) -> Row | None:
    """Kernels per frame, counted in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--count", which, str(index)]
        command += ["--synthetic", options.synthetic]
        command += ["--dtype", options.dtype] if options.dtype else []
        done = subprocess.run(
            command, env=saving_to(Path(folder)), stdout=subprocess.PIPE, check=True
        )
    answer: Row | None = json.loads(done.stdout)
    return answer


def count(options: argparse.Namespace, which: str, index: int) -> None:
    _, dtype = dtype_named(options.dtype)
    pair = sides(options.synthetic, CASES[index], dtype, which)
    run = pair.ours if which == "ours" else pair.theirs
    launched = launched_per_frame(lambda frames: run(frames), *COUNTED_FRAMES)
    print(json.dumps(msgspec.to_builtins(launched)))


def measured(options: argparse.Namespace, index: int, dtype: mx.Dtype) -> Row:
    case = CASES[index]
    pair = sides(options.synthetic, case, dtype)
    row: Row = {"case": case.name, "bits": case.bits, "their_recipe": case.recipe}
    row["greedy_codes_equal"] = agreement(pair)
    row |= timed(pair, options.frames, options.short, options.repeats)
    request = Request(pair.prompt, options.frames, Sampling(), 0)
    slots = cache_slots(pair.engine, request)
    ours, other = row["ours"], row["theirs"]
    ours["bytes_per_frame"] = total_bytes(frame_reads(pair.engine.model, slots, pair.dtype))
    other["bytes_per_frame"] = theirs.frame_bytes(pair.other)
    fused = {
        "ours": step_primitives(pair.engine, request),
        "theirs": theirs.step_primitives(pair.other, pair.prompt, fused=True),
    }
    unfused = {
        "ours": unfused_primitives(pair.engine, request),
        "theirs": theirs.step_primitives(pair.other, pair.prompt, fused=False),
    }
    for name in ("ours", "theirs"):
        row[name]["primitives"] = fused[name].dispatched
        row[name]["primitives_before_fusion"] = unfused[name].dispatched
        row[name]["primitives_by_name"] = fused[name].by_name
    if case.recipe == theirs.THEIRS:
        whole = theirs.build(random_dual_ar(GEOMETRIES[options.synthetic]))
        row["their_whole_recipe"] = theirs.own_recipe_fails(whole, pair.prompt) or "runs"
    row["ratio"] = other["ms_per_frame"] / ours["ms_per_frame"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", choices=("full", "tiny"), default="full")
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("--short", type=int, help="frames of the short run (default: a tenth)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--cases", help=f"numbers of cases, of {dict(enumerate(CASES))}")
    parser.add_argument("--no-kernels", action="store_true", help="do not count CUDA kernels")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--count", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(options, options.count[0], int(options.count[1]))
        return 0
    if options.short is None:
        options.short = max(options.frames // 10, 2)
    if not 1 <= options.short < options.frames:
        parser.error("--short must be less than --frames")
    name, dtype = dtype_named(options.dtype)
    chosen = [int(n) for n in options.cases.split(",")] if options.cases else range(len(CASES))
    on_cuda = mx.cuda.is_available() and on_gpu()
    rows = []
    for index in chosen:
        print(f"{CASES[index].name} …", file=sys.stderr)
        row = measured(options, index, dtype)
        gc.collect()
        mx.clear_cache()
        for side in ("ours", "theirs"):
            counted = on_cuda and not options.no_kernels
            row[side]["cuda"] = kernels(options, index, side) if counted else None
        rows.append(row)
        if options.json:  # after each case: a run that is cut keeps what it has
            write(options, name, rows)
    print_table(rows, name)
    return 0


def write(options: argparse.Namespace, dtype: str, rows: list[Row]) -> None:
    document = {
        "schema": "warble-compare/1",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": this_command(),
        "machine": msgspec.to_builtins(this_machine()),
        "mlx_audio": theirs.VERSION,
        "model": f"synthetic {options.synthetic}",
        "dtype": dtype,
        "frames": options.frames,
        "frames_short": options.short,
        "repeats": options.repeats,
        "cases": rows,
    }
    options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def print_table(rows: list[Row], dtype: str) -> None:
    machine = this_machine()
    print(f"{machine.device}; mlx {machine.mlx}, mlx-audio {theirs.VERSION}, {dtype}\n")
    print("| case | | ms/frame | ratio | kernels | primitives | before fusion | MB/frame |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        for side, label in (("ours", "warble-mlx"), ("theirs", "mlx-audio")):
            own = row[side]
            launched = f"{own['cuda']['kernels']:,.0f}" if own["cuda"] else "–"
            cells = [
                row["case"] if side == "ours" else f"greedy equal: {row['greedy_codes_equal']}",
                label,
                f"{own['ms_per_frame']:.2f}",
                f"{row['ratio']:.2f}x" if side == "ours" else "1",
                launched,
                f"{own['primitives']:,}",
                f"{own['primitives_before_fusion']:,}",
                f"{own['bytes_per_frame'] / 1e6:,.0f}",
            ]
            print("| " + " | ".join(cells) + " |")
    for row in rows:
        if "their_whole_recipe" in row:
            print(
                f"\nmlx-audio's whole 4-bit recipe, tied embedding too: {row['their_whole_recipe']}"
            )


if __name__ == "__main__":
    sys.exit(main())
