"""Test vectors of the Swift package, from the runtime's own functions.

python tests/ios_vectors.py        # writes samples/ios/Tests/WarbleKitTests/vectors.json
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import ios_data
import mlx.core as mx
import numpy as np

from warble_mlx.engine import PREFILL_MULTIPLE
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export import facts
from warble_mlx.ios_export.drive import chunks
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


def manifest() -> str:
    """The fields of a manifest that the package reads, of the bundled model."""
    import msgspec

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
        "sha256": {text: hashlib.sha256(text.encode()).hexdigest() for text in texts},
        "manifest": manifest(),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
