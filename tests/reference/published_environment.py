"""Make an environment for the published code, and dump what it computes in it.

    cd tests && python -m reference.published_environment CHECKPOINT OUT.safetensors

Needs a network or a wheel cache for pip. The environment is kept in --folder and used again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from reference.published import TRANSFORMERS

TESTS = Path(__file__).resolve().parent.parent
PACKAGES = (
    f"transformers=={TRANSFORMERS}",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "msgspec",
)


def environment(folder: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made if it is not there."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def main() -> int:
    """The command; its exit status is the dump's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(".venv-published"))
    args, rest = parser.parse_known_args()
    python = environment(args.folder)
    command = [python, "-m", "reference.published", args.checkpoint, args.out, *rest]
    # The dump's format and the config reader come from this source tree.
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
