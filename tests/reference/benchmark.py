"""How fast the reference engine is: eager, partly compiled, and whole frames in a CUDA graph.

    cd tests && PYTHONPATH=.:.. python -m reference.benchmark --json speed.json
    cd tests && PYTHONPATH=.:.. python -m reference.benchmark --device cpu --size tiny --frames 20

Published geometry, random weights, bfloat16, batch 1, 150 frames with the default sampling, all in
one run on one device. A frame's time is what 150 frames take longer than a few, so that the prompt
and the start are not in it; the best of the runs counts. With `--mlx` this package's own benchmark
is run beside it, in processes of its own, and its figures join the table.

Useful bytes are those that a frame cannot do without: all slow layers, nine times the fast layers
and their head, the rows of the output head. They are the same for every mode, and set against the
bandwidth of a plain copy on the same device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import fields_of, text_columns, write_checkpoint
from torch import nn
from torch.profiler import ProfilerActivity, profile

from reference.dump import forbid_tf32
from reference.generate import generate
from reference.load import load_dual_ar
from reference.sampling import Sampling
from reference.static import StaticEngine
from reference.transformer import DualAR

PROMPT_COLUMNS = 64
SHORT = 10  # frames of the run that is taken off
COUNTED = (4, 12)  # frames of the two runs whose launches are counted
COPY_BYTES = 1 << 30
ROOM = 192  # cache slots for frames, the same in every mode
SETTINGS = Sampling()

Run = Callable[[int], object]
"""Generate so many frames and wait for them."""


def eager(model: DualAR) -> Run:
    """The plain loop."""
    return looped(model, None)


def partly_compiled(model: DualAR) -> Run:
    """The plain loop around a compiled slow step."""
    on_gpu = model.embeddings.weight.is_cuda
    backend = "inductor" if on_gpu else "eager"  # no compiler is asked for on a CPU
    return looped(model, torch.compile(model.advance, fullgraph=True, backend=backend))


def looped(model: DualAR, advance: Any) -> Run:
    """`generate` with caches of one size, so that a compiled step keeps its shapes."""
    columns, mask = prompt(model)

    def run(frames: int) -> None:
        generate(
            model, columns, mask, frames, SETTINGS, advance=advance, ignore_eos=True, room=ROOM
        )
        wait(model)

    return run


def static(model: DualAR) -> Run:
    """Whole frames, captured on a GPU."""
    columns, mask = prompt(model)
    engine = StaticEngine(model, 1, PROMPT_COLUMNS + ROOM, SETTINGS)

    def run(frames: int) -> None:
        engine.run(columns, mask, frames, ignore_eos=True)
        wait(model)

    return run


MODES = {"eager": eager, "partly compiled": partly_compiled, "static": static}


def prompt(model: DualAR) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and mask of one row."""
    device = model.embeddings.weight.device
    fields = {"pad_token_id": model.config.pad_token_id}
    columns = text_columns(fields, PROMPT_COLUMNS)[None].to(device)
    return columns, torch.ones(1, PROMPT_COLUMNS, dtype=torch.bool, device=device)


def wait(model: DualAR) -> None:
    """Until the device has done everything."""
    if model.embeddings.weight.is_cuda:
        torch.cuda.synchronize()


def seconds(run: Run, frames: int) -> float:
    """What one run takes."""
    begun = time.perf_counter()
    run(frames)
    return time.perf_counter() - begun


def ms_per_frame(run: Run, frames: int, runs: int) -> list[float]:
    """Milliseconds of every run."""
    return [
        1000 * (seconds(run, frames) - seconds(run, SHORT)) / (frames - SHORT) for _ in range(runs)
    ]


def launches(run: Run) -> dict[str, float]:
    """Per frame: kernels that ran on the GPU, and launches by the host (kernels, graphs)."""
    short, long = (counted(run, frames) for frames in COUNTED)
    frames = COUNTED[1] - COUNTED[0]
    return {name: (long[name] - short[name]) / frames for name in ("kernels", "launches", "graphs")}


def counted(run: Run, frames: int) -> Counter[str]:
    """The same for a whole run."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        run(frames)
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found["kernels"] += not event.name.startswith(("Memcpy", "Memset"))
        elif event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            found["launches"] += 1
        elif event.name.startswith("cudaGraphLaunch"):
            found["graphs"] += 1
    return found


def useful_bytes(model: DualAR) -> int:
    """That a frame must read, without the cache."""

    def size(*modules: nn.Module) -> int:
        return sum(p.nbytes for module in modules for p in module.parameters())

    fast = size(model.fast_layers, model.fast_norm, model.fast_output)
    passes = model.config.num_codebooks - 1
    return size(model.layers, model.norm) + model.head.nbytes + passes * fast


def copy_bandwidth(device: str) -> float:
    """Bytes per second read and written by a plain copy."""
    size = COPY_BYTES if device == "cuda" else COPY_BYTES >> 4
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 20 * size / (time.perf_counter() - begun))
    return best


def measure(model: DualAR, device: str, frames: int, runs: int, modes: list[str]) -> dict[str, Any]:
    """Every mode, and what it is held against."""
    bandwidth, needed = copy_bandwidth(device), useful_bytes(model)
    frame_ms = 1000 / model.config.frame_rate_hz
    rows = []
    for mode in modes:
        run = MODES[mode](model)
        begun = time.perf_counter()
        run(SHORT)
        warm_up = time.perf_counter() - begun
        run(frames)
        times = ms_per_frame(run, frames, runs)
        best = min(times)
        rows.append(
            {
                "mode": mode,
                "ms_per_frame": best,
                "all_ms_per_frame": times,
                "rtf": best / frame_ms,
                "warm_up_s": warm_up,
                "per_frame": launches(run) if device == "cuda" else None,
                "bandwidth": needed / best * 1000,
                "share_of_copy": needed / best * 1000 / bandwidth,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "dtype": str(model.dtype).removeprefix("torch."),
        "frames": frames,
        "prompt": PROMPT_COLUMNS,
        "useful_bytes": needed,
        "copy_bandwidth": bandwidth,
        "rows": rows,
    }


def mlx_row(bits: int, size: str, frames: int) -> dict[str, Any]:
    """This package's runtime, measured by `warble bench` in a process of its own."""
    command = [sys.executable, "-m", "warble_mlx", "bench", "--synthetic", size]
    command += ["--bits", str(bits), "--frames", str(frames), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"mode": f"MLX, {bits}-bit", "error": done.stderr.strip().splitlines()[-1:]}
    report = json.loads(done.stdout)
    ms = report["generation"]["ms_per_step"]
    return {"mode": f"MLX, {bits}-bit", "ms_per_frame": ms, "report": report}


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    base = next((r["ms_per_frame"] for r in report["rows"] if r["mode"] == "eager"), None)
    lines = [
        f"{report['device']}, torch {report['torch']}, {report['dtype']}, batch 1,"
        f" {report['frames']} frames, copy {report['copy_bandwidth'] / 1e9:,.0f} GB/s,"
        f" {report['useful_bytes'] / 1e6:,.0f} MB per frame",
        f"{'mode':18}{'ms/frame':>9}{'RTF':>8}{'speed-up':>9}{'kernels':>9}{'launches':>9}"
        f"{'GB/s':>8}{'of copy':>9}",
    ]
    for row in report["rows"]:
        if "error" in row:
            lines.append(f"{row['mode']:18}{row['error']}")
            continue
        counts = row.get("per_frame") or {}
        hosts = counts.get("launches", 0) + counts.get("graphs", 0) if counts else None
        cells = [
            f"{row['ms_per_frame']:9.2f}",
            f"{row['rtf']:8.3f}" if "rtf" in row else " " * 8,
            f"{base / row['ms_per_frame']:8.1f}x" if base else " " * 9,
            f"{counts['kernels']:9.0f}" if counts else " " * 9,
            f"{hosts:9.0f}" if hosts is not None else " " * 9,
            f"{row['bandwidth'] / 1e9:8,.0f}" if "bandwidth" in row else " " * 8,
            f"{row['share_of_copy']:9.1%}" if "share_of_copy" in row else " " * 9,
        ]
        lines.append(f"{row['mode']:18}{''.join(cells)}".rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--mlx", action="store_true", help="run `warble bench` as well")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not SHORT < args.frames <= ROOM:
        parser.error(f"--frames must lie between {SHORT + 1} and {ROOM}")
    forbid_tf32()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder) / "random", args.size, device=args.device)
        model = load_dual_ar(source, dtype, args.device)
    report = measure(model, args.device, args.frames, args.runs, args.modes)
    if args.mlx:
        del model
        if args.device == "cuda":
            torch.cuda.empty_cache()
        frame_ms = 1000 * fields_of(args.size)["codec_frame_size"] / 44100
        for bits in (16, 4):
            row = mlx_row(bits, args.size, args.frames)
            if "error" not in row:
                row["rtf"] = row["ms_per_frame"] / frame_ms
            report["rows"].append(row)
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
