"""Runs `warble` and kills it without warning: after a time, or before a change to a file.

    python killing.py STEP FOLDER VOICE warble's arguments …

kills itself before change number STEP (from 0) to anything in FOLDER: a file opened for writing,
made, renamed, linked or removed, or a folder made. What libraries written in C open is not seen.
VOICE is `real`, or `quick` for a stand-in that speaks noise.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR
KILLED = -signal.SIGKILL
NEVER = 1_000_000
FRAME_S = 0.005


def run(
    args: Sequence[str | Path],
    folder: Path,
    *,
    voice: str = "quick",
    at_step: int = NEVER,
    after_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `warble` with these arguments in `folder`, to its end or until it is killed there."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(at_step), folder, voice, *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _is_change(event: str, args: tuple[object, ...], folder: str) -> bool:
    if event == "open":
        flags = args[2]
        if not (isinstance(flags, int) and flags & WRITING):
            return False
    elif event not in CHANGES:
        return False
    if event in ("os.remove", "os.rmdir") and args[1] != -1:  # in a folder that is being emptied
        return True
    name = args[0]
    return isinstance(name, str | os.PathLike) and os.path.abspath(name).startswith(folder + os.sep)


def kill_at(step: int, folder: str) -> None:
    """From now on, die before that change to anything in `folder`, a path without links."""
    seen = 0

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if _is_change(event, args, folder):
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(watch)


def _speak_noise() -> None:
    import time

    import speaking

    import warble_mlx
    from warble_mlx import ensemble

    # A little time per frame, so that there is some to be killed in.
    warble, _ = speaking.quick_warble(lambda *_: time.sleep(FRAME_S))
    vars(warble_mlx)["load"] = lambda *_, **__: warble
    vars(ensemble)["Batch"] = speaking.QuickBatch


def _pack_without_mlx_lm() -> None:
    import packing_stand_in
    import pytest

    packing_stand_in.install(pytest.MonkeyPatch())


def main() -> int:
    """See the module."""
    step, folder, voice, *args = sys.argv[1:]
    from warble_mlx import cli

    if args[0] in ("say", "batch") and voice == "quick":
        _speak_noise()
    if args[0] in ("convert", "quantize") and importlib.util.find_spec("mlx_lm") is None:
        _pack_without_mlx_lm()
    kill_at(int(step), os.path.realpath(folder))
    return cli.main(args)


if __name__ == "__main__":
    sys.exit(main())
