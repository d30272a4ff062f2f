"""Warble and Audio8 text-to-speech on Apple silicon.

    from warble_mlx import load
    warble = load()
    warble.say("Hello.").save("hello.wav")

Names are imported when they are first used, so that `import warble_mlx` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warble_mlx.errors import WarbleError

if TYPE_CHECKING:
    from warble_mlx.reading import Chunk
    from warble_mlx.registered import RegisteredVoice
    from warble_mlx.speech import Speech, Stream, Warble, load
    from warble_mlx.voices import Voice

__version__ = "0.1.0"
__all__ = [
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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'warble_mlx' has no attribute {name!r}")
    from warble_mlx.backend import prepare

    prepare()  # before the first import of MLX
    if name == "Voice":
        from warble_mlx.voices import Voice

        return Voice
    if name == "RegisteredVoice":
        from warble_mlx.registered import RegisteredVoice

        return RegisteredVoice
    import warble_mlx.speech

    return getattr(warble_mlx.speech, name)


def __dir__() -> list[str]:
    return sorted(__all__)
