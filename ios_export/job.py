"""What every part of an export is given and gives back."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from warble_mlx import __version__
from warble_mlx.config import ModelConfig
from warble_mlx.ios_export.graph_file import Device
from warble_mlx.ios_export.manifest import Check, File, Function, MemoryEstimate, Part, Requires
from warble_mlx.ios_export.mlx_functions import Loaded, load_for_export
from warble_mlx.prompt import Prompt, PromptBuilder
from warble_mlx.voices import read_voices
from warble_mlx.weights import DECODER_FILE, MODEL_FILE

PARTS = ("mlxfn", "mlx-swift", "coreml")
MLX_VERSION = version("mlx")
CHECK_FRAMES = 100
SHORT_FRAMES = 20  # said with the short sentence
CHECK_TEXT = (
    "The harbour was quiet in the early morning, and the boats lay still beside the long stone"
    " wall, waiting for the wind."
)
SELFTEST_TEXT = "Hello there."
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class Options:
    """What the person chose. `trained`: the model speaks, so that its speech can be judged."""

    dtype: str = "bfloat16"
    device: Device = "gpu"
    check_frames: int = CHECK_FRAMES
    trained: bool = True


@dataclass(frozen=True)
class Job:
    """One export: where it reads, what was chosen, and how it tells what it is doing."""

    bundle: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    options: Options
    say: Callable[[str], None] = field(default=lambda _: None)

    @property
    def dtype(self) -> mx.Dtype:
        return DTYPES[self.options.dtype]

    @cached_property
    def loaded(self) -> Loaded:
        """The bundle's modules, loaded once for all parts."""
        self.say("loading the bundle")
        return load_for_export(self.bundle, self.dtype)

    @cached_property
    def prompts(self) -> PromptBuilder:
        return PromptBuilder.from_folder(self.bundle, self.config)

    def prompt(self, text: str) -> Prompt:
        """A prompt for the bundle's default voice."""
        voice = read_voices(self.bundle).default_voice
        return self.prompts.build(text, speaker=voice.token if voice else "")

    @property
    def check_text(self) -> str:
        """What is said to compare tokens: a long sentence, or a short one for few frames."""
        return CHECK_TEXT if self.options.check_frames > SHORT_FRAMES else SELFTEST_TEXT

    @cached_property
    def made_from(self) -> str:
        """Tells bundles, options and versions apart: a part with the same one need not be built
        again."""
        digest = hashlib.sha256(f"{__version__} {MLX_VERSION} {self.options}".encode())
        for name in ("config.json", MODEL_FILE, DECODER_FILE, "tokenizer.json"):
            digest.update(sha256(self.bundle / name).encode())
        return digest.hexdigest()


@dataclass
class Built:
    """What building a part gave, before its files are counted."""

    about: str
    requires: Requires
    roles: dict[str, str]
    checks: list[Check]
    memory: MemoryEstimate
    functions: list[Function] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optional: frozenset[str] = frozenset()


def part_record(name: str, job: Job, built: Built, folder: Path, started: float) -> Part:
    """The manifest's entry of a part whose files lie in `folder`."""
    functions = tuple(
        _replace_file(function, f"{name}/{function.file}") for function in built.functions
    )
    return Part(
        name=name,
        about=built.about,
        made_from=job.made_from,
        seconds=round(time.monotonic() - started, 1),
        peak_rss_bytes=peak_rss_bytes(),
        requires=built.requires,
        files=tuple(list_files(folder, name, built.roles, built.optional)),
        functions=functions,
        memory=built.memory,
        checks=tuple(built.checks),
        notes=tuple(built.notes),
    )


def _replace_file(function: Function, file: str) -> Function:
    return Function(
        **{f: getattr(function, f) for f in function.__struct_fields__ if f != "file"}, file=file
    )


def list_files(
    folder: Path, prefix: str, roles: dict[str, str], optional: frozenset[str] = frozenset()
) -> list[File]:
    """Every file below `folder`, under `prefix`/. `roles` are by first path component."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        inside = path.relative_to(folder)
        top = inside.parts[0]
        found.append(
            File(
                path="/".join(filter(None, (prefix, inside.as_posix()))),
                bytes=path.stat().st_size,
                sha256=sha256(path),
                role=roles[top],
                optional=top in optional,
            )
        )
    return found


def sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def peak_rss_bytes() -> int:
    """Most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
