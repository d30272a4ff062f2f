"""MLX against the reference engine on one GPU: every rung, with a JSON report.

    cd tests && PYTHONPATH=.:.. python -m reference.cuda_ladder --json report.json

Needs PyTorch and MLX, both with CUDA (`--device cpu` tries the script itself), NumPy, msgspec,
tokenizers; not pytest. The report is written anew after every climb, so that a run that is cut off
leaves what it had. This is the one file here that imports MLX, to run it.

    transformers   tiny and published geometry, float32 and bfloat16, batch 1 and 4, 300 frames
    4-bit          MLX's packed kernels against the reference engine with the dequantised weights
    alone          cached against whole, compiled against plain
    static         the reference engine's CUDA graph against its own eager loop
    codec          decoding and encoding, published geometry
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read once, when MLX starts

from warble_mlx.backend import prepare

prepare()

import mlx.core as mx  # noqa: E402
import msgspec  # noqa: E402
import torch  # noqa: E402
from random_checkpoint import fields_of, text_columns, write_checkpoint  # noqa: E402

from reference.dump import (  # noqa: E402
    ReferenceEngine,
    forbid_tf32,
    open_engine,
    tf32_allowed,
)
from reference.generate import generate, pad_left  # noqa: E402
from reference.record import codec_tensors, info_of, record_batch  # noqa: E402
from reference.rope import rope_table  # noqa: E402
from reference.static import StaticEngine  # noqa: E402
from warble_mlx.verify import climb as ladder  # noqa: E402
from warble_mlx.verify.compare import Outcome  # noqa: E402
from warble_mlx.verify.dump import Dump  # noqa: E402
from warble_mlx.verify.subject import load_subject  # noqa: E402

PROMPT_LENGTHS = (64, 101, 47, 80)
SAMPLED_FRAMES = 48
CODEC_FRAMES = 40


class Climb(NamedTuple):
    """One comparison: its name, and what yields its outcomes."""

    name: str
    run: Callable[[Bench], Iterator[Outcome]]


class Bench(NamedTuple):
    """Where checkpoints lie, which device the reference engine uses, how long runs are."""

    folder: Path
    device: str
    frames: int
    sizes: tuple[str, str]  # tiny, full; smaller ones to try the script

    def checkpoint(self, size: str, *, codec: bool = False) -> Path:
        """A checkpoint in the published layout, made on first use."""
        name = self.sizes[0] if size == "tiny" else self.sizes[1]
        path = self.folder / f"{name}{'-codec' if codec else ''}".replace(" ", "-")
        if not path.is_dir():
            write_checkpoint(path, name, codec=codec, device=self.device)
        return path

    def prompts(self, size: str, rows: int) -> list[torch.Tensor]:
        """Prompts of different lengths."""
        fields = fields_of(self.sizes[0] if size == "tiny" else self.sizes[1])
        return [text_columns(fields, n, n) for n in PROMPT_LENGTHS[:rows]]


def transformers(size: str, dtype: str, rows: int) -> Climb:
    """Both transformers."""

    def run(bench: Bench) -> Iterator[Outcome]:
        folder = bench.checkpoint(size)
        engine = open_engine(folder, dtype, bench.device)
        sampled = SAMPLED_FRAMES if dtype == "float32" and rows == 1 else 0
        sampled = min(sampled, bench.frames)
        dump = record_batch(engine, bench.prompts(size, rows), bench.frames, sampled)
        del engine
        subject = load_subject(folder, dtype)
        yield from ladder.climb(subject, dump, ladder.limits_for(subject, dump.info), rows=rows)

    return Climb(f"{size} {dtype} batch {rows}", run)


def four_bits(size: str, dtype: str) -> Climb:
    """Packed weights on MLX's side, what they stand for on the other."""

    def run(bench: Bench) -> Iterator[Outcome]:
        folder = pack(bench.checkpoint(size))
        weights = open_packed(folder, dtype, bench.device)
        dump = record_batch(weights, bench.prompts(size, 1), bench.frames)
        del weights
        subject = load_subject(folder, dtype)
        yield from ladder.climb(subject, dump, ladder.limits_for(subject, dump.info))

    return Climb(f"{size} 4-bit {dtype}", run)


def alone(size: str, dtype: str) -> Climb:
    """MLX against itself: cached against whole, compiled against plain."""

    def run(bench: Bench) -> Iterator[Outcome]:
        yield from ladder.climb_alone(load_subject(bench.checkpoint(size), dtype))

    return Climb(f"{size} {dtype} alone", run)


def static(size: str) -> Climb:
    """The reference engine's two ways of running, greedy in float32."""

    def run(bench: Bench) -> Iterator[Outcome]:
        engine = open_engine(bench.checkpoint(size), "float32", bench.device)
        columns, mask = pad_left(
            [p.to(bench.device) for p in bench.prompts(size, 4)], engine.config.pad_token_id
        )
        eager = generate(engine.model, columns, mask, bench.frames)
        slots = columns.shape[2] + bench.frames
        graph = StaticEngine(engine.model, len(columns), slots).run(columns, mask, bench.frames)
        same = (eager.codes == graph.codes).all(dim=1)
        yield Outcome(
            rung="static codes",
            state="passed" if bool(same.all()) else "failed",
            compared=same.numel(),
            agreement=float(same.float().mean()),
            message="" if bool(same.all()) else f"frames differ, the first is {first(same)}",
        )

    return Climb(f"reference {size} static against eager", run)


def first(same: torch.Tensor) -> str:
    """Row and frame of the first false entry of [B, F]."""
    row, frame = (int(i) for i in (~same).nonzero()[0])
    return f"frame {frame} of row {row}"


def codec(bench: Bench) -> Iterator[Outcome]:
    """The codec's ladder."""
    from warble_mlx.convert import convert

    source = bench.checkpoint("full", codec=True)
    bundle = source.with_name(source.name + "-bundle")
    if not bundle.is_dir():
        convert(source, bundle, codec_dtype="float32")
    engine = open_engine(source, "float32", bench.device)
    random = torch.Generator().manual_seed(1)
    books = engine.config.codebook_size
    codes = torch.randint(0, books, (10, CODEC_FRAMES), generator=random).numpy()
    tensors = codec_tensors(engine, codes)
    tensors["rope.codec"] = rope_table(160, 64, 10000.0).numpy()
    dump = Dump(info_of(engine, [], {}), tensors)
    subject = load_subject(bundle, "float32")
    del engine
    yield from ladder.climb_codec(subject, dump)


def pack(source: Path) -> Path:
    """A copy of a checkpoint whose block Linears are packed to 4 bits in groups of 64."""
    out = source.with_name(source.name + "-4bit")
    if out.is_dir():
        return out
    out.mkdir()
    weights = mx.load(str(source / "model.safetensors"))
    for name in [n for n in weights if "layers." in n and weights[n].ndim == 2]:
        stem = name.removesuffix(".weight")
        triple = mx.quantize(weights.pop(name), group_size=64, bits=4)
        for part, value in zip(("weight", "scales", "biases"), triple, strict=True):
            weights[f"{stem}.{part}"] = value
    mx.save_safetensors(str(out / "model.safetensors"), weights)
    fields = json.loads((source / "config.json").read_text())
    fields["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (out / "config.json").write_text(json.dumps(fields))
    return out


def open_packed(folder: Path, dtype: str, device: str) -> ReferenceEngine:
    """The reference engine with the weights that a packed checkpoint stands for."""
    from reference.bundle import read_bundle_model
    from reference.dump import DTYPES
    from reference.load import dual_ar
    from warble_mlx.config import read_config

    model = dual_ar(read_config(folder), read_bundle_model(folder), DTYPES[dtype], device)
    return ReferenceEngine(model, packed=True)


CLIMBS = (
    transformers("tiny", "float32", 1),
    transformers("tiny", "float32", 4),
    transformers("tiny", "bfloat16", 1),
    transformers("tiny", "bfloat16", 4),
    four_bits("tiny", "float32"),
    four_bits("tiny", "bfloat16"),
    alone("tiny", "float32"),
    static("tiny"),
    transformers("full", "float32", 1),
    transformers("full", "float32", 4),
    static("full"),
    transformers("full", "bfloat16", 1),
    transformers("full", "bfloat16", 4),
    four_bits("full", "float32"),
    four_bits("full", "bfloat16"),
    alone("full", "float32"),
    alone("full", "bfloat16"),
    Climb("codec", codec),
)


def settings(device: str) -> dict[str, Any]:
    """What the climbs ran with."""
    on_gpu = device != "cpu"
    return {
        "torch": str(torch.__version__),
        "mlx": ladder.mlx_version(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "mlx_device": str(mx.default_device()),
        "MLX_ENABLE_TF32": os.environ.get("MLX_ENABLE_TF32"),
        "torch_tf32": tf32_allowed(),
        "mlx_tf32": ladder.tf32_allowed(),
    }


def climbed(one: Climb, bench: Bench) -> dict[str, Any]:
    """The outcomes of one climb as plain data. An error is a failed rung, not the end."""
    begun = time.perf_counter()
    outcomes: list[Outcome] = []
    try:
        for outcome in one.run(bench):
            outcomes.append(outcome)
            print("  ", ladder.format_outcome(outcome), flush=True)
    except Exception as error:  # whatever it is, the climbs behind it still tell something
        failed = Outcome(rung="run", state="failed", message=f"{type(error).__name__}: {error}")
        outcomes.append(failed)
        print("  ", ladder.format_outcome(failed), flush=True)
    mx.clear_cache()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "name": one.name,
        "passed": all(o.state != "failed" for o in outcomes),
        "ties": sum(o.ties for o in outcomes),
        "seconds": round(time.perf_counter() - begun, 1),
        "outcomes": msgspec.to_builtins(outcomes),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command. 0 if every climb passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--only", default="", help="climbs whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="small geometries, for a try")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    args = parser.parse_args(arguments)
    forbid_tf32()
    report = {"settings": settings(args.device), "frames": args.frames, "climbs": []}
    print(json.dumps(report["settings"], indent=1))
    sizes = ("small", "small") if args.quick else ("tiny", "full")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args.folder or Path(temporary), args.device, args.frames, sizes)
        for one in CLIMBS:
            if args.only not in one.name or (args.quick and "codec" in one.name):
                continue
            print(one.name, flush=True)
            report["climbs"].append(climbed(one, bench))
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
    broken = [c["name"] for c in report["climbs"] if not c["passed"]]
    ties = sum(c["ties"] for c in report["climbs"])
    print(f"{len(report['climbs'])} climbs, {ties} ties, failed: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
