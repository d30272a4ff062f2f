"""Write golden/dump_small.safetensors: the reference engine on the small synthetic checkpoint.

    cd tests && python -m reference.small_dump

It lets the tests of `warble verify` run where PyTorch is not installed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import synthetic

from reference.dump import open_engine
from reference.record import hashes, record
from warble_mlx.verify.dump import Dump, write_dump

PATH = Path(__file__).parent.parent / "golden" / "dump_small.safetensors"
FRAMES, SAMPLED_FRAMES = 12, 24
# With these numbers a first token in the repetition window, no rescue at all, and a kept candidate
# that crosses top-p each change the sampled codes.
SEED = 3


def small_dump(folder: Path) -> Dump:
    """What the engine computes from the checkpoint that is written into `folder`."""
    synthetic.write_source(folder)
    return record(
        open_engine(folder),
        frames=FRAMES,
        sampled_frames=SAMPLED_FRAMES,
        seed=SEED,
        checkpoint=hashes(folder),
    )


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder:
        write_dump(PATH, small_dump(Path(folder) / "checkpoint"))
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
