"""Test vectors of the Swift package, from the runtime's own functions.

python tests/ios_vectors.py        # writes samples/ios/Tests/WarbleKitTests/vectors.json
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import ios_data
import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.engine import PREFILL_MULTIPLE
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export import facts
from warble_mlx.ios_export.drive import chunks
from warble_mlx.safetensors_file import from_float32, write_safetensors
from warble_mlx.sampling import NOTHING, Settings, choose_semantic, kept, race, rank, remember
from warble_mlx.voices import read_voices

PATH = Path(__file__).parent.parent / "samples/ios/Tests/WarbleKitTests/vectors.json"
STEPS = 12
SCORES = 12


def rounded(values: np.ndarray) -> list[Any]:
    """Numbers with few digits, so that they are the same float32 in every reader."""
    found: list[Any] = np.round(values.astype(np.float64), 3).tolist()
    return found


def settings(top_k: int, top_p: float, temperature: float) -> Settings:
    return Settings(mx.array([top_k]), mx.array([top_p]), mx.array([temperature]))


def draw(seed: int, top_k: int, top_p: float, temperature: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    scores, uniforms = rounded(rng.normal(0, 2, SCORES)), rounded(rng.uniform(0, 1, SCORES))
    ranking = rank(mx.array([scores]))
    chosen = settings(top_k, top_p, temperature)
    keep = np.array(kept(ranking, chosen.top_k, chosen.top_p))[0]
    return {
        "scores": scores,
        "uniforms": uniforms,
        "top_k": top_k,
        "top_p": top_p,
        "temperature": temperature,
        "kept": np.array(ranking.order)[0][keep].tolist(),
        "chosen": int(race(ranking, chosen, mx.array([uniforms])).item()),
    }


def semantic(defaults: Any) -> dict[str, Any]:
    """A few tokens in a row with scores that favour two of them, so that one repeats soon."""
    rng = np.random.default_rng(5)
    regular = settings(defaults.top_k, defaults.top_p, defaults.temperature)
    rescue = settings(defaults.top_k, defaults.rescue_top_p, defaults.rescue_temperature)
    recent = mx.full((1, defaults.rescue_window), NOTHING, dtype=mx.uint32)
    found: dict[str, Any] = {"scores": [], "uniforms": [], "chosen": []}
    for step in range(STEPS):
        scores = rng.normal(0, 0.5, SCORES)
        scores[2:5] += 2
        given = rounded(scores), rounded(rng.uniform(0, 1, (2, SCORES)))
        uniforms = mx.array(given[1])[:, None]
        chosen = choose_semantic(mx.array([given[0]]), regular, rescue, uniforms, recent)
        recent = remember(recent, chosen, mx.array([step]))
        found["scores"].append(given[0])
        found["uniforms"].append(given[1])
        found["chosen"].append(int(chosen.item()))
    return found


def prompt(text: str, voice_name: str) -> dict[str, Any]:
    voice = read_voices(bundled_folder()).find(voice_name)
    job = ios_data.job_on(bundled_folder())
    ids = job.prompts.build(text, speaker=voice.token).columns[0].tolist()
    return {
        "text": text,
        "voice": voice_name,
        "ids": ids,
        "padding": -len(ids) % PREFILL_MULTIPLE,
    }


def schedule(frames: int) -> dict[str, Any]:
    found = [[0, 1, 1]]
    while (done := found[-1][0] + found[-1][1]) < frames:
        found.append([done, min(7, frames - done), 7])
    return {"frames": frames, "chunks": found}


def wav(samples: list[float]) -> dict[str, Any]:
    body = b"".join(struct.pack("<h", round(max(-1, min(1, s)) * 32767)) for s in samples)
    head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(body), b"WAVEfmt ", 16, 1, 1, 44_100,
                       88_200, 2, 16, b"data", len(body))  # fmt: skip
    return {"samples": samples, "hex": (head + body).hex()}


def embedding() -> dict[str, Any]:
    """Tables of a model with 8 ids and 3 codes a book, columns, and what they become."""
    begin, size, width, books = 4, 3, 2, 10
    job = ios_data.job_on(bundled_folder())
    tokens = msgspec.to_builtins(facts.tokens(job)) | {
        "semantic_begin": begin,
        "semantic_end": begin + size - 1,
        "codebooks": books,
        "codebook_size": size,
        "byte_ids": [],
    }
    # Small multiples of an eighth: exact in 16 bits, and their sums in any order.
    values = np.arange((begin + size + 1 + books * size) * width, dtype=np.float32) % 37 / 8
    text, codes = np.split(values.reshape(-1, width), [begin + size + 1])
    tables = {"model.embeddings.weight": text, "model.codebook_embeddings.weight": codes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.safetensors"
        write_safetensors(
            path,
            {name: ("BF16", table.shape) for name, table in tables.items()},
            lambda name: from_float32(tables[name], "BF16"),
        )
        stored = path.read_bytes()
    spoken = [code % size for code in range(1, books + 1)]
    columns = [[2] + books * [0], [begin + spoken[0], *spoken]]
    frame = text[begin + spoken[0]] + sum(codes[b * size + c] for b, c in enumerate(spoken))
    return {
        "hex": stored.hex(),
        "tokens": tokens,
        "columns": columns,
        "rows": [text[2].tolist(), frame.tolist()],
    }


def manifest() -> str:
    """The fields of a manifest that the package reads, of the bundled model."""
    job = ios_data.job_on(bundled_folder())
    found = {
        "schema": "warble-ios/1",
        "audio": facts.audio(job),
        "tokens": facts.tokens(job),
        "sampling": facts.sampling(job),
        "voices": facts.voices(job, [], Path()),
        "files": [],
        "parts": [],
    }
    return msgspec.json.encode(found).decode()


def vectors() -> dict[str, Any]:
    """All of vectors.json."""
    job = ios_data.job_on(bundled_folder())
    draws = [
        draw(seed, *chosen)
        for seed in range(6)
        for chosen in ((50, 0.9, 0.7), (3, 0.95, 1.3), (50, 0.2, 0.7), (1, 0.9, 1.0))
    ]
    texts = ["abc", "", "a" * 55, "The quick brown fox."]
    return {
        "draws": draws,
        "semantic": semantic(facts.sampling(job)),
        "prompts": [prompt("Hello  there.", "Vera"), prompt("Grüße aus Köln!", "corvin")],
        "schedules": [schedule(frames) for frames in (1, 2, 8, 20)],
        "prefill": [list(chunks(length)) for length in (32, 96, 320)],
        "wav": wav([0.0, 0.5, -1.0, 2.0, -0.25]),
        "embedding": embedding(),
        "sha256": {text: hashlib.sha256(text.encode()).hexdigest() for text in texts},
        "manifest": manifest(),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
