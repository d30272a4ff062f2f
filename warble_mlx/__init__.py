"""Warble and Audio8 text-to-speech on Apple silicon.

    from warble_mlx import load
    warble = load()
    warble.say("Hello.").save("hello.wav")

Names are imported when they are first used, so that `import warble_mlx` costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from warble_mlx.errors import WarbleError

if TYPE_CHECKING:
    from warble_mlx.reading import Chunk
    from warble_mlx.registered import RegisteredVoice
    from warble_mlx.results import Speech
    from warble_mlx.speech import Warble, load
    from warble_mlx.streaming import AsyncStream, Stream
    from warble_mlx.voices import Voice

__version__ = "0.1.0"
__all__ = [
    "AsyncStream",
    "Chunk",
    "RegisteredVoice",
    "Speech",
    "Stream",
    "Voice",
    "Warble",
    "WarbleError",
    "__version__",
    "load",
]
_HOMES = {
    "AsyncStream": "streaming",
    "Chunk": "reading",
    "RegisteredVoice": "registered",
    "Speech": "results",
    "Stream": "streaming",
    "Voice": "voices",
    "Warble": "speech",
    "load": "speech",
}

# Python started in a checkout imports this folder, whatever is installed, and `warble_mlx.convert`,
# `quant` and `ios_export` lie beside it there, not in it.
_TREE = Path(__file__).resolve().parent.parent
if (_TREE / "pyproject.toml").is_file() and (_TREE / "ios_export" / "__init__.py").is_file():
    __path__.append(str(_TREE))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'warble_mlx' has no attribute {name!r}")
    from importlib import import_module

    from warble_mlx.backend import prepare

    prepare()  # before the first import of MLX
    return getattr(import_module(f"warble_mlx.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
