"""The recipe, stage by stage, or all of it with a time budget.

    python -m samples.bundled_voice all --work WORK --size smoke --engine toy
    python -m samples.bundled_voice all --work WORK --corpus corpus.tsv.xz \\
        --kokoro kokoro.onnx --styles styles.npz

Every stage writes its result into WORK and can be run again alone: synthesise, codec, encode,
dual-ar, decoder (more training of the codec's decoding half, the codes unchanged), export. With
--resume a training goes on from what an earlier run left. `source` is not part of the training: it
speaks every line of --corpus alone, in each of the five voices, for `evaluate --source`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from samples.bundled_voice import casting, corpus, export, kokoro, kokoro_weights
from samples.bundled_voice.encode import encode
from samples.bundled_voice.progress import Budget, log
from samples.bundled_voice.settings import SIZES, Settings
from samples.bundled_voice.synthesise import speak_each, synthesise
from samples.bundled_voice.toy_engine import ToyEngine, toy_tables
from samples.bundled_voice.train_codec import train_codec
from samples.bundled_voice.train_dual_ar import train_dual_ar

TRAINING = ("synthesise", "codec", "encode", "dual-ar", "decoder", "export")
STAGES = ("all", *TRAINING, "deliver", "source")


@dataclass
class Work:
    """Where the stages put things."""

    root: Path

    def __post_init__(self) -> None:
        self.shards = self.root / "shards"
        self.source = self.root / "source"
        self.codec = self.root / "codec.safetensors"
        self.refined = self.root / "codec_refined.safetensors"
        self.codes = self.root / "codes.npz"
        self.dual_ar = self.root / "dual_ar.safetensors"
        self.checkpoint = self.root / "checkpoint"

    def best_codec(self) -> Path:
        return self.refined if self.refined.exists() else self.codec


def main() -> None:
    options = parsed()
    stages = TRAINING if options.stage == "all" else (options.stage,)
    for stage in stages:
        seconds = options.seconds or getattr(options, stage.replace("-", "_") + "_seconds", 0)
        began = time.monotonic()
        log(f"stage {stage}")
        run(stage, options, float(seconds))
        log(f"stage {stage}: {time.monotonic() - began:.0f} s")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m samples.bundled_voice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--engine", choices=("kokoro", "toy"), default="kokoro")
    parser.add_argument("--corpus", type=Path, help="made by samples.bundled_voice.corpus")
    parser.add_argument("--kokoro", type=Path, help="the 8-bit ONNX file of Kokoro-82M")
    parser.add_argument("--styles", type=Path, help="made by casting.pack_tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes of the synthesis")
    parser.add_argument("--hours", type=float, default=1e9, help="audio per synthesis process")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, help="for deliver: where the parts go")
    parser.add_argument("--steps", type=int, help="train so many steps, whatever they take")
    parser.add_argument(
        "--seconds", type=float, help="for this stage, instead of the budgets below"
    )
    for stage, seconds in (
        ("synthesise", 240), ("codec", 470), ("dual-ar", 400), ("decoder", 370),
    ):  # fmt: skip
        parser.add_argument(f"--{stage}-seconds", type=float, default=seconds)
    return parser.parse_args()


def run(stage: str, options: argparse.Namespace, seconds: float) -> None:
    settings: Settings = SIZES[options.size]
    work = Work(options.work)
    device = torch.device(options.device)
    budget = Budget(seconds, options.steps)
    if stage == "synthesise":
        in_processes(speak, options, work, seconds)
    elif stage == "source":
        in_processes(speak_source, options, work)
    elif stage == "codec":
        train_codec(settings, work.shards, work.codec, budget, device, resume=options.resume)
    elif stage == "encode":
        encode(settings, work.shards, work.codec, work.codes, device)
    elif stage == "dual-ar":
        texts = [text for text, _ in lines_of(options)]
        train_dual_ar(
            settings, work.codes, texts, work.dual_ar, budget, device, resume=options.resume
        )
    elif stage == "decoder":
        train_codec(
            settings, work.shards, work.refined, budget, device,
            resume=options.resume, decoder_only=True, start=work.codec,
        )  # fmt: skip
    elif stage == "export":
        export.export(settings, work.best_codec(), work.dual_ar, work.checkpoint)
        log(f"checkpoint in {work.checkpoint}; next: warble convert {work.checkpoint}")
    elif stage == "deliver":
        export.deliver(work.best_codec(), work.dual_ar, options.out)


def lines_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The corpus, or a handful of sentences for the toy engine."""
    if options.corpus:
        return corpus.read(options.corpus)
    if options.engine == "toy":
        return [
            ("Good morning.", "ɡˈʊd mˈɔɹnɪŋ."),
            ("It is five PM.", "ɪT ɪz fˈIv pˌiˈɛm."),
            ("The low orange.", "ðə lˈO ˈɔɹɪnʤ."),
            ("That will never do.", "ðæt wɪl nˈɛvəɹ dˈu."),
        ]
    raise SystemExit("--corpus is missing: make it with python -m samples.bundled_voice.corpus")


def in_processes(
    speaking: Callable[..., None], options: argparse.Namespace, work: Work, *more: float
) -> None:
    """One process per worker; they share what devices there are and write shards of their own."""
    if options.workers == 1:
        speaking(0, options, work, *more)
        return
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=speaking, args=(worker, options, work, *more))
        for worker in range(options.workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process of the synthesis failed; its message is above")


def speak(worker: int, options: argparse.Namespace, work: Work, seconds: float) -> None:
    tables, engine = speaker(worker, options)
    synthesise(
        lines_of(options), tables, engine, work.shards, seconds,
        worker=worker, workers=options.workers, hours=options.hours,
    )  # fmt: skip


def speak_source(worker: int, options: argparse.Namespace, work: Work) -> None:
    tables, engine = speaker(worker, options)
    lines = lines_of(options)
    speak_each(lines, tables, engine, work.source, worker=worker, workers=options.workers)


def speaker(
    worker: int, options: argparse.Namespace
) -> tuple[casting.Table, kokoro.Kokoro | ToyEngine]:
    """What one process of the synthesis speaks with."""
    torch.manual_seed(worker)
    if options.engine == "toy":
        names = sorted({name for own in casting.CHARACTERS.values() for name in own.blend})
        return toy_tables(names), ToyEngine()
    if not (options.kokoro and options.styles):
        raise SystemExit("--kokoro and --styles are missing: see samples/bundled_voice/README.md")
    torch.set_num_threads(1 if options.workers > 1 else torch.get_num_threads())
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    device = options.device
    if device == "cuda":
        device = f"cuda:{worker % torch.cuda.device_count()}"
    engine = kokoro.Kokoro(kokoro_weights.read_onnx(options.kokoro), device)
    return casting.read_tables(options.styles), engine
