"""Do the parity tests see the bugs that ports of this architecture have had?

    python tests/mutations.py            # all of them, minutes
    python tests/mutations.py rope top   # those whose name holds one of the words

Each mutation is a textual change to a copy of the sources. The fast parity tests run against the
copy; a mutation is caught if one of them fails. The unchanged copy must pass first. A pattern that
does not occur exactly once in its file is an error: the list below has to follow the sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("convert", "quant", "ios_export")  # shipped as warble_mlx.<folder>
TRANSFORMERS = ("test_parity_dual_ar.py", "test_parity_sampling.py")
SAMPLING = ("test_parity_sampling.py", "test_repetition_window.py")
CODEC = ("test_codec_*.py", "test_end_to_end.py::test_the_codec_decodes_the_golden_codes")
CONVERT = ("test_convert_transform.py", "test_convert_layouts.py")


@dataclass(frozen=True)
class Change:
    """Text to replace, and what by, in a file below warble_mlx."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A named bug and the tests that have to see it."""

    name: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]


def mutation(name: str, tests: tuple[str, ...], *changes: tuple[str, str, str]) -> Mutation:
    return Mutation(name, tests, tuple(Change(*change) for change in changes))


FAST_ENTRY = "given = normed if config.norm_fastlayer_input else state.hidden\n"
FAST_SPLIT = "q, kv = attention.split(cache[:, :last])\n"
BOOK_ROWS = "self._book_rows = places(c.num_codebooks) * c.codebook_size\n"
PAST = "past = self.window - 1\n"
ROTATED = "return rotate(pairs, factors)\n"
HALF_ROTATED = (
    "half = pairs.reshape(*pairs.shape[:-2], 2, -1).swapaxes(-1, -2)\n"
    "        return rotate(half, factors).swapaxes(-1, -2).reshape(pairs.shape)\n"
)

MUTATIONS = (
    mutation(
        "stale hidden state (the previous step's) into the fast AR",
        TRANSFORMERS,
        (
            "engine.py",
            FAST_ENTRY,
            f"{FAST_ENTRY}        given, self._stale = getattr(self, '_stale', given), given\n",
        ),
    ),
    mutation(
        "un-normed hidden state into the fast AR",
        TRANSFORMERS,
        ("engine.py", FAST_ENTRY, "given = state.hidden\n"),
    ),
    mutation(
        "hidden state of the last column but one after prefill",
        TRANSFORMERS,
        (
            "engine.py",
            "return State(\n            hidden=last_position(hidden),\n            slot=mx.array(",
            "return State(\n            hidden=hidden[:, -2],\n            slot=mx.array(",
        ),
    ),
    mutation(
        "half-rotation RoPE instead of interleaved",
        TRANSFORMERS,
        ("layers.py", ROTATED, HALF_ROTATED),
    ),
    mutation(
        "RoPE table not rounded to bfloat16",
        TRANSFORMERS,
        ("layers.py", ".astype(mx.bfloat16).astype(mx.float32)\n", "\n"),
    ),
    mutation(
        "RoPE table not rounded to bfloat16 (codec)",
        CODEC,
        ("layers.py", ".astype(mx.bfloat16).astype(mx.float32)\n", "\n"),
    ),
    mutation(
        "half-rotation RoPE instead of interleaved (codec)",
        CODEC,
        ("layers.py", ROTATED, HALF_ROTATED),
    ),
    mutation(
        "RoPE positions that count padding",
        TRANSFORMERS,
        ("dual_ar.py", "mx.where(query >= end, end - begin, 0)", "mx.zeros_like(query)"),
    ),
    mutation(
        "padding seen by attention",
        TRANSFORMERS,
        ("dual_ar.py", "(key <= query) & ((key < begin) | (key >= end))", "key <= query"),
    ),
    mutation(
        "the candidate that crosses top-p kept",
        SAMPLING,
        (
            "sampling.py",
            "(ranking.mass <= top_p[..., None])",
            "(ranking.mass - mx.softmax(ranking.scores, axis=-1) <= top_p[..., None])",
        ),
    ),
    mutation(
        "temperature before the filter",
        SAMPLING,
        (
            "sampling.py",
            "keep = kept(ranking, settings.top_k, settings.top_p)\n",
            "keep = kept(ranking._replace(mass=mx.cumsum(mx.softmax(ranking.scores / temperature,"
            " axis=-1), axis=-1)), settings.top_k, settings.top_p)\n",
        ),
    ),
    mutation(
        "one candidate more than top-k",
        SAMPLING,
        ("sampling.py", "(place < top_k[..., None])", "(place <= top_k[..., None])"),
    ),
    mutation(
        "first token recorded in the repetition window",
        SAMPLING,
        (
            "sampling.py",
            "return mx.where((frame > 0)[:, None], shifted, recent)\n",
            "return shifted\n",
        ),
    ),
    mutation(
        "no repetition rescue",
        SAMPLING,
        ("sampling.py", "return mx.where(repeated, other, regular)\n", "return regular\n"),
    ),
    mutation(
        "the end rescued as a repetition",
        SAMPLING,
        (
            "sampling.py",
            "(recent == regular[:, None]).any(axis=-1) & (regular != eos)\n",
            "(recent == regular[:, None]).any(axis=-1)\n",
        ),
    ),
    mutation(
        "rescue drawn with the request's own temperature",
        SAMPLING,
        (
            "engine.py",
            "temperature=mx.full(settings.temperature.shape, config.ras_temperature),\n",
            "temperature=settings.temperature,\n",
        ),
    ),
    mutation(
        "two codebooks exchanged in the embedding",
        TRANSFORMERS,
        (
            "dual_ar.py",
            BOOK_ROWS,
            "self._book_rows = mx.array([0, 1, 3, 2, *range(4, c.num_codebooks)])"
            " * c.codebook_size\n",
        ),
    ),
    mutation(
        "c0 not counted in the codebook embeddings",
        TRANSFORMERS,
        (
            "dual_ar.py",
            "self.codebook_embeddings.weight[codes + self._book_rows]\n",
            "self.codebook_embeddings.weight[(codes + self._book_rows)[..., 1:]]\n",
        ),
    ),
    mutation(
        "fast AR cache not reset between frames",
        TRANSFORMERS,
        ("dual_ar.py", "class Columns(nn.Module):\n", "_KEPT = {}\nclass Columns(nn.Module):\n"),
        (
            "dual_ar.py",
            FAST_SPLIT,
            f"{FAST_SPLIT}"
            "            old = _KEPT.get((id(block), x.shape[0]))\n"
            "            if last == 10:\n"
            "                _KEPT[id(block), x.shape[0]] = kv\n"
            "            if old is not None and length == 1:\n"
            "                kv = mx.concatenate([old, kv], axis=3)\n",
        ),
    ),
    mutation(
        "fast AR positions off by one",
        TRANSFORMERS,
        (
            "dual_ar.py",
            "factors = (even[first:last], odd[first:last])\n",
            "factors = tuple(f[max(first - 1, 0) :][:length] for f in (even, odd))\n",
        ),
    ),
    mutation(
        "w1 and w3 swapped",
        TRANSFORMERS,
        (
            "layers.py",
            "gate, value = mx.split(project(self.w13, x), 2, axis=-1)\n",
            "value, gate = mx.split(project(self.w13, x), 2, axis=-1)\n",
        ),
    ),
    mutation(
        "w1 and w3 swapped when loaded",
        TRANSFORMERS,
        ("weights.py", "mx.concatenate([weight, other])", "mx.concatenate([other, weight])"),
    ),
    mutation(
        "w1 and w3 swapped when loaded (codec)",
        CODEC,
        ("weights.py", "mx.concatenate([weight, other])", "mx.concatenate([other, weight])"),
    ),
    mutation(
        "two codebooks exchanged in decoding",
        CODEC,
        (
            "codec/quantizer.py",
            "book(codes[:, i]) for i, book",
            "book(codes[:, {2: 3, 3: 2}.get(i, i)]) for i, book",
        ),
    ),
    mutation(
        "two codebooks exchanged in encoding",
        CODEC,
        (
            "codec/quantizer.py",
            "return mx.stack(codes, axis=1)\n",
            "return mx.stack([*codes[:2], codes[3], codes[2], *codes[4:]], axis=1)\n",
        ),
    ),
    mutation(
        "out-of-range codes wrap instead of being clamped",
        CODEC,
        (
            "codec/quantizer.py",
            "known = mx.clip(codes, 0, self.codebook.weight.shape[0] - 1)\n",
            "known = codes % self.codebook.weight.shape[0]\n",
        ),
    ),
    mutation(
        "convolution kernels reversed",
        CODEC,
        (
            "codec/convolution.py",
            "x[:, i * dilation : i * dilation + count], weight[:, i].T)\n",
            "x[:, i * dilation : i * dilation + count], weight[:, -1 - i].T)\n",
        ),
    ),
    mutation(
        "depthwise kernels reversed",
        CODEC,
        ("codec/convolution.py", "* taps[:, i]\n", "* taps[:, -1 - i]\n"),
        ("codec/convolution.py", "* taps[:, 0]\n", "* taps[:, -1]\n"),
    ),
    mutation(
        "in and out channels of transposed convolutions mixed up where they fit",
        CODEC,
        (
            "codec/convolution.py",
            "spread = x @ self.conv.weight.reshape(out * kernel, inputs).T\n",
            "weight = self.conv.weight\n"
            "        weight = weight.swapaxes(0, 2) if out == inputs else weight\n"
            "        spread = x @ weight.reshape(out * kernel, inputs).T\n",
        ),
    ),
    mutation(
        "overlap of transposed convolutions not carried",
        CODEC,
        ("codec/convolution.py", "carry.put(late[:, -1])", "carry.put(mx.zeros_like(tail))"),
    ),
    mutation(
        "codec window one position too long",
        CODEC,
        ("codec/transformer.py", f"{PAST}        start =", "past = self.window\n        start ="),
        ("codec/transformer.py", f"{PAST}        slot =", "past = self.window\n        slot ="),
    ),
    mutation(
        "codec positions that start again with each chunk",
        CODEC,
        (
            "codec/transformer.py",
            "positions = start[:, None] + mx.arange(length)\n",
            "positions = mx.zeros_like(start)[:, None] + mx.arange(length)\n",
        ),
    ),
    mutation(
        "layer scale left out",
        CODEC,
        ("codec/transformer.py", "return x * self.gamma\n", "return x\n"),
    ),
    mutation(
        "approximate GELU in ConvNeXt",
        CODEC,
        ("codec/convolution.py", "nn.gelu(y)", "nn.gelu_fast_approx(y)"),
    ),
    mutation(
        "in and out channels of square transposed convolutions mixed up in conversion",
        CONVERT,
        (
            "convert/names.py",
            '("latent", "latent", "kernel"), TRANSPOSED)',
            '("latent", "latent", "kernel"), CONV)',
        ),
    ),
    mutation(
        "weight norm taken over all dimensions",
        CONVERT,
        (
            "convert/transform.py",
            "scale = magnitude / np.sqrt(squares)[:, None, None]\n",
            "scale = magnitude / np.sqrt(np.full_like(squares, squares.sum()))[:, None, None]\n",
        ),
    ),
)  # fmt: skip


def assemble(folder: Path) -> None:
    """A runnable copy: the package with its mapped folders in place, the tests, the settings."""
    ignore = shutil.ignore_patterns("__pycache__", "bundled")
    shutil.copytree(ROOT / "warble_mlx", folder / "warble_mlx", ignore=ignore)
    for name in MAPPED:
        shutil.copytree(ROOT / name, folder / "warble_mlx" / name, ignore=ignore)
    (folder / "warble_mlx" / "bundled").symlink_to(ROOT / "warble_mlx" / "bundled")
    (folder / "tests").mkdir()
    for path in (ROOT / "tests").iterdir():
        if path.suffix == ".py":
            shutil.copy(path, folder / "tests")
        elif path.is_dir() and path.name != "__pycache__":
            (folder / "tests" / path.name).symlink_to(path)
    shutil.copy(ROOT / "pyproject.toml", folder)


def apply(folder: Path, mutated: Mutation) -> None:
    """Change the copy. Raises SystemExit when a pattern does not occur exactly once."""
    for change in mutated.changes:
        path = folder / "warble_mlx" / change.file
        source = path.read_text(encoding="utf-8")
        count = source.count(change.old)
        if count != 1:
            raise SystemExit(
                f"mutation '{mutated.name}': its pattern occurs {count} times in {change.file},"
                f" it must occur once: {change.old!r}"
            )
        path.write_text(source.replace(change.old, change.new), encoding="utf-8")


def run_tests(folder: Path, patterns: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit code in the copy, and its first failing test or its last words."""
    chosen = []
    for pattern in patterns:
        file, colons, test = pattern.partition("::")
        found = sorted((folder / "tests").glob(file))
        if not found:
            raise SystemExit(f"no test matches {pattern}")
        chosen += [f"{path}{colons}{test}" for path in found]
    where = [sys.executable, "-c", "import warble_mlx; print(warble_mlx.__file__)"]
    # Without the variable that adds tests elsewhere: those of this tree alone must be enough.
    environment = {k: v for k, v in os.environ.items() if k != "WARBLE_SHARED"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    used = subprocess.run(
        where, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    if Path(used).parent != folder / "warble_mlx":
        raise SystemExit(f"the tests would run against {used} instead of the copy")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider",
               "-m", "not slow and not ear and not cuda and not mac", *chosen]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    first = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py\S*.*)$", output, re.MULTILINE)
    return done.returncode, first[1] if first else output.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only mutations whose name holds one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    if not chosen:
        parser.error(f"no mutation's name holds {' or '.join(words)}")
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary).resolve()
        for mutated in chosen:  # a stale pattern is found before anything runs
            folder = base / "check"
            assemble(folder)
            apply(folder, mutated)
            shutil.rmtree(folder)
        assemble(base / "unchanged")
        for patterns in dict.fromkeys(m.tests for m in chosen):
            code, last = run_tests(base / "unchanged", patterns)
            print(f"unchanged, {' '.join(patterns)}: {last}", file=sys.stderr, flush=True)
            if code != 0:
                raise SystemExit("the unchanged sources must pass first")
        survivors = 0
        print("| mutation | caught | first failing test | s |\n| --- | --- | --- | --- |")
        for number, mutated in enumerate(chosen):
            folder = base / str(number)
            assemble(folder)
            apply(folder, mutated)
            started = time.perf_counter()
            code, first = run_tests(folder, mutated.tests)
            if code not in (0, 1):
                raise SystemExit(f"mutation '{mutated.name}' could not be run: {first}")
            survivors += code == 0
            verdict, shown = ("yes", first) if code else ("**NO**", "")
            seconds = time.perf_counter() - started
            print(f"| {mutated.name} | {verdict} | {shown[:110]} | {seconds:.0f} |", flush=True)
            shutil.rmtree(folder)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
