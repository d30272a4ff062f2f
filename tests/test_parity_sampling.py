"""Filter, race and repetition rescue against the reference's numbers."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from golden_data import assert_same_codes, manifest, tensors

from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Emission, Engine, Request, Sampling
from warble_mlx.prompt import Prompt
from warble_mlx.sampling import NOTHING, Settings, choose_semantic, kept, race, rank, remember

CASES = [
    "normal256", "normal256_t1", "peaked", "two_peaks", "flat", "flat_all", "top1",
    "tiny_temperature", "small_p", "hot", "wide4096", "k_beyond_size", "masked_inputs",
]  # fmt: skip


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return tensors("sampling")


def settings(top_k: int = 50, top_p: float = 0.9, temperature: float = 0.7) -> Settings:
    return Settings(mx.array([top_k]), mx.array([top_p]), mx.array([temperature]))


def test_every_filter_case_is_tested(golden: dict[str, np.ndarray]) -> None:
    assert {k.split(".")[1] for k in golden if k.startswith("filter.")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_candidates_and_choices(golden: dict[str, np.ndarray], case: str) -> None:
    what = manifest()["files"]["sampling.safetensors"][f"filter.{case}.logits"]["what"]
    found = re.search(r"top_k=(\d+), top_p=([\d.]+), temperature=([\de.-]+)", what)
    assert found is not None
    chosen = settings(int(found[1]), float(found[2]), float(found[3]))
    ranking = rank(mx.array(golden[f"filter.{case}.logits"])[None])
    survivors = np.zeros(ranking.order.shape[-1], bool)
    survivors[np.array(ranking.order[0])] = np.array(kept(ranking, chosen.top_k, chosen.top_p)[0])
    assert np.array_equal(survivors, golden[f"filter.{case}.kept"].astype(bool))
    draws = mx.array(golden[f"filter.{case}.uniforms"])[:, None]
    winners = race(ranking, Settings(*(s[None] for s in chosen)), draws)[:, 0]
    assert np.array_equal(np.array(winners), golden[f"filter.{case}.choices"])


def test_a_zero_uniform_never_wins() -> None:
    uniforms = mx.array([[0.0, 0.5, 0.5]])
    scores = mx.array([[5.0, 4.9, -9.0]])
    assert race(rank(scores), settings(top_p=1.0, temperature=1.0), uniforms).item() == 1


def test_zero_settings_keep_the_best() -> None:
    scores, uniforms = mx.array([[1.0, 3.0, 2.0]]), mx.array([[0.99, 0.01, 0.99]])
    for chosen in (settings(top_k=0), settings(top_p=0.0), settings(temperature=0.0)):
        assert race(rank(scores), chosen, uniforms).item() == 1


def restricted(tiny_dual_ar: DualAR) -> np.ndarray:
    c = tiny_dual_ar.config
    return np.r_[c.semantic_begin_id : c.semantic_end_id + 1, c.eos_token_id]


def test_repetition_rescue(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    rows = restricted(tiny_dual_ar)
    logits = mx.array(golden["ras.logits"][rows])[None]
    recent, tokens = mx.full((1, 10), NOTHING, dtype=mx.uint32), []
    for step, draws in enumerate(golden["ras.uniforms"][:, :, rows]):
        chosen = choose_semantic(
            logits,
            settings(),
            settings(top_p=0.9, temperature=1.0),
            mx.array(draws)[:, None],
            recent,
        )
        recent = remember(recent, chosen, mx.array([step]))
        tokens.append(rows[chosen.item()])
    assert tokens == golden["ras.tokens"].tolist()


def test_sampled_codes_with_the_reference_noise(
    tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]
) -> None:
    rows, engine = restricted(tiny_dual_ar), Engine(tiny_dual_ar, compiled=False)
    columns = tensors("ar_tiny")["p1.prompt_ids"][0]
    state, frames = engine.prefill(Prompt(columns[:, :7], columns[:, 7:])), []
    for semantic, codes in zip(
        golden["generate.uniforms_semantic"][:, :, rows],
        golden["generate.uniforms_codebooks"],
        strict=True,
    ):
        noise = (mx.array(semantic)[:, None], mx.array(codes)[:, None])
        emitted, state = engine.frame_step(state, settings(), noise)
        frames.append(np.array(emitted)[0, 1:])
    assert_same_codes(np.array(frames).T, golden["generate.codes"][0], "sampled")


def sampled(engine: Engine, seeds: list[int], rows: int, **settings: float) -> list[np.ndarray]:
    columns = tensors("ar_tiny")["p1.prompt_ids"][0]
    prompt = Prompt(columns[:, :7], columns[:, 7:])
    queue = [Request(prompt, 24, Sampling(**settings), seed) for seed in seeds]
    frames: list[list[np.ndarray]] = [[] for _ in seeds]
    e: Emission
    for e in engine.generate(queue, rows=rows):
        if e.codes is not None:
            frames[e.request].append(e.codes)
    return [np.array(f).T for f in frames]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(tiny_dual_ar: DualAR) -> None:
    engine = Engine(tiny_dual_ar, compiled=False)
    seeds = [7, 2**32 - 1, 7]
    alone = [sampled(engine, [seed], 1)[0] for seed in seeds]
    together = sampled(engine, seeds, 2)
    for seed, a, b in zip(seeds, alone, together, strict=True):
        assert_same_codes(b, a, f"seed {seed}")
    assert not np.array_equal(alone[0], alone[1]), "different seeds must differ"


def test_a_seed_gives_the_same_tokens_compiled_or_not(
    tiny_dual_ar: DualAR, compiled_tiny_engine: Engine
) -> None:
    plain = sampled(Engine(tiny_dual_ar, compiled=False), [3], 1)[0]
    assert_same_codes(sampled(compiled_tiny_engine, [3], 1)[0], plain, "compiled")


def test_temperature_zero_is_greedy_beside_sampled_rows(tiny_dual_ar: DualAR) -> None:
    """A greedy row in a batch with a sampled one yields the greedy tokens."""
    engine = Engine(tiny_dual_ar, compiled=False)
    columns = tensors("ar_tiny")["p1.prompt_ids"][0]
    prompt = Prompt(columns[:, :7], columns[:, 7:])
    queue = [Request(prompt, 24, Sampling(temperature=0), 0), Request(prompt, 24, Sampling(), 1)]
    frames: list[list[np.ndarray]] = [[], []]
    for e in engine.generate(queue, rows=2):
        if e.codes is not None:
            frames[e.request].append(e.codes)
    assert_same_codes(np.array(frames[0]).T, tensors("ar_tiny")["p1.codes"][0][:, :24], "greedy")


def test_noise_is_uniform_and_depends_on_seed_and_frame(tiny_dual_ar: DualAR) -> None:
    engine = Engine(tiny_dual_ar, compiled=False)

    def draw(seed: int, frame: int) -> np.ndarray:
        a, b = engine.noise(mx.array([seed], dtype=mx.uint32), mx.array([frame]))
        return np.concatenate([np.array(a).ravel(), np.array(b).ravel()])

    one = draw(1, 0)
    assert one.size == 2 * 257 + 9 * 256
    assert one.min() >= 0
    assert one.max() < 1
    assert abs(one.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(one, draw(1, 1))[0, 1]) < 0.1
    assert abs(np.corrcoef(one, draw(2, 0))[0, 1]) < 0.1
    assert np.array_equal(one, draw(1, 0))
