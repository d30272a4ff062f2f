"""The PyTorch reference engine against the numbers of the published code: transformers, fp32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from golden_data import assert_close, assert_same_codes, manifest, tensors

torch = pytest.importorskip("torch", reason="the reference engine needs PyTorch")

from reference.generate import Noise, Trace, generate, pad_left, prefill  # noqa: E402
from reference.load import load_dual_ar  # noqa: E402
from reference.rope import rope_table  # noqa: E402
from reference.sampling import Sampling, choose_semantic, filtered, race, remember  # noqa: E402
from reference.static import StaticEngine  # noqa: E402
from reference.transformer import DualAR  # noqa: E402

LIMIT = 1e-4
# case: max_new_tokens of the published call
CASES = {"p1": 48, "p2": 48, "p3": 48, "p4": 80, "p5": 48, "p6": 48, "p7": 1, "p8": 8}
Golden = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small products: handing them out costs more than it saves


@pytest.fixture(scope="module")
def golden() -> Golden:
    return tensors("ar_tiny")


@pytest.fixture(scope="module")
def sampled() -> Golden:
    return tensors("sampling")


@pytest.fixture(scope="module")
def model(tiny_source: Path) -> DualAR:
    return load_dual_ar(tiny_source)


def prompt(golden: Golden, case: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(golden[f"{case}.prompt_ids"]).long()
    return ids, torch.from_numpy(golden[f"{case}.prompt_mask"]).bool()


def head_rows(model: DualAR) -> list[int]:
    c = model.config
    return [*range(c.semantic_begin_id, c.semantic_end_id + 1), c.eos_token_id]


def test_rope_tables_are_bit_equal(model: DualAR, golden: Golden) -> None:
    assert np.array_equal(model.slow_rope.numpy(), golden["rope.slow"])
    assert np.array_equal(model.fast_rope.numpy(), golden["rope.fast"])
    full = rope_table(2048, 64, 1e6).to(torch.bfloat16).view(torch.uint16)
    assert np.array_equal(full.numpy(), tensors("rope_full")["slow_bits"])


@torch.no_grad()
def test_embedding_layers_and_logits(model: DualAR, golden: Golden) -> None:
    columns, mask = prompt(golden, "p1")
    at, outputs = torch.arange(columns.shape[2]), []
    x = model.embed(columns)
    assert_close(x[0], golden["p1.embedding"], 1e-6, "embedding")
    model.advance(x, at, at[None], mask, model.slow_caches(1, len(at)), outputs)
    for i, output in enumerate(outputs):
        assert_close(output[0], golden[f"p1.layer{i}"], LIMIT, f"layer {i}")
    normed = model.norm(outputs[-1])
    assert_close(normed[0], golden["p1.final_norm"], LIMIT, "final norm")
    assert_close(model.all_logits(normed[0]), golden["p1.logits_all"], LIMIT, "logits")
    last = model.semantic_logits(normed[0, -1])
    assert_close(last, golden["p1.semantic_logits_last"], LIMIT, "semantic logits")


@torch.no_grad()
def test_a_padded_row_computes_what_it_computes_alone(model: DualAR, golden: Golden) -> None:
    columns, mask = prompt(golden, "p3")
    state = prefill(model, columns, mask, 4)
    assert_close(state.hidden, golden["p3.prefill_hidden"][:, -1], LIMIT, "hidden")
    alone = [row[:, keep] for row, keep in zip(columns, mask, strict=True)]
    again, same_mask = pad_left(alone, model.config.pad_token_id)
    assert torch.equal(again, columns)
    assert torch.equal(same_mask, mask)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_codes(model: DualAR, golden: Golden, case: str, static: bool) -> None:
    columns, mask = prompt(golden, case)
    frames = CASES[case]
    if static:
        engine = StaticEngine(model, len(columns), columns.shape[2] + frames)
        result = engine.run(columns, mask, frames)
    else:
        result = generate(model, columns, mask, frames)
    assert result.lengths == golden[f"{case}.code_lengths"].tolist()
    assert result.finished == golden[f"{case}.finished"].astype(bool).tolist()
    for row, wanted in enumerate(golden[f"{case}.codes"]):
        assert_same_codes(result.codes[row].numpy(), wanted, f"{case}[{row}]")


@pytest.mark.parametrize("case", ["p1", "p4"])
def test_hidden_and_logits_of_every_step(model: DualAR, golden: Golden, case: str) -> None:
    trace = Trace()
    result = generate(model, *prompt(golden, case), CASES[case], trace=trace)
    steps, frames = len(trace.normed), result.lengths[0]
    assert steps == frames + result.finished[0]
    wanted = golden[f"{case}.step_logits"][:steps, head_rows(model)]
    assert_close(torch.cat(trace.normed), golden[f"{case}.step_hidden"][:steps], LIMIT, "hidden")
    assert_close(torch.cat(trace.semantic_logits), wanted, LIMIT, "logits")
    fast = torch.cat(trace.fast_logits)[:frames]
    assert_close(fast, golden[f"{case}.fast_logits"][:frames, 1:], LIMIT, "fast logits")


FILTERS = sorted(
    name.split(".")[1] for name in tensors("sampling") if re.fullmatch(r"filter\..*\.logits", name)
)


@pytest.mark.parametrize("case", FILTERS)
def test_candidates_and_choices(sampled: Golden, case: str) -> None:
    what = manifest()["files"]["sampling.safetensors"][f"filter.{case}.logits"]["what"]
    found = re.search(r"top_k=(\d+), top_p=([\d.]+), temperature=([\de.-]+)", what)
    assert found is not None
    settings = Sampling(int(found[1]), float(found[2]), float(found[3]))
    scores = filtered(torch.from_numpy(sampled[f"filter.{case}.logits"])[None], settings)
    kept = sampled[f"filter.{case}.kept"].astype(bool)
    assert np.array_equal(torch.isfinite(scores[0]).numpy(), kept)
    chances = scores.softmax(dim=-1)[0]
    assert_close(chances, sampled[f"filter.{case}.probabilities"], 1e-6, "probabilities")
    uniforms = torch.from_numpy(sampled[f"filter.{case}.uniforms"])
    choices = race(scores.expand(len(uniforms), -1), uniforms)
    assert choices.tolist() == sampled[f"filter.{case}.choices"].tolist()


def test_repetition_rescue(model: DualAR, sampled: Golden) -> None:
    rows = head_rows(model)
    logits = torch.from_numpy(sampled["ras.logits"])[None, rows]
    recent, tokens = torch.full((1, 10), -1), []
    for step, uniforms in enumerate(torch.from_numpy(sampled["ras.uniforms"])[:, :, rows]):
        rescue = Sampling(top_p=0.9, temperature=1.0)
        chosen = choose_semantic(logits, Sampling(), rescue, uniforms[:, None], recent)
        recent = remember(recent, chosen, step)
        tokens.append(rows[chosen.item()])
    assert tokens == sampled["ras.tokens"].tolist()


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_sampled_codes_with_given_noise(
    model: DualAR, golden: Golden, sampled: Golden, static: bool
) -> None:
    semantic = torch.from_numpy(sampled["generate.uniforms_semantic"])[:, :, head_rows(model)]
    codes = torch.from_numpy(sampled["generate.uniforms_codebooks"])
    noise = Noise(semantic[:, :, None], codes[:, :, None])
    columns, mask = prompt(golden, "p1")
    if static:
        engine = StaticEngine(model, 1, columns.shape[2] + 24, Sampling())
        result = engine.run(columns, mask, 24, noise)
    else:
        result = generate(model, columns, mask, 24, Sampling(), noise)
    assert_same_codes(result.codes[0].numpy(), sampled["generate.codes"][0], "sampled")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "frames"), [("", 12), ("reference.", 6)])
def test_full_size(full_source: Path, case: str, frames: int) -> None:
    torch.set_num_threads(2)
    golden, model = tensors("ar_full"), load_dual_ar(full_source)
    columns = torch.from_numpy(golden[f"{case}prompt_ids"]).long()
    trace = Trace()
    result = generate(model, columns, torch.ones(columns[:, 0].shape), frames, trace=trace)
    assert_same_codes(result.codes[0].numpy(), golden[f"{case}codes"][0], case or "plain")
    if not case:
        hidden, logits = golden["step_hidden"][:frames], golden["semantic_logits_prefill"]
        assert_close(torch.cat(trace.normed), hidden, LIMIT, "hidden")
        assert_close(trace.semantic_logits[0][0], logits, LIMIT, "logits")
        assert_close(trace.fast_logits[0][0], golden["fast_logits_step0"][1:], LIMIT, "fast")
