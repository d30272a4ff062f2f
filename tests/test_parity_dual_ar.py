"""The two transformers and the loop against the reference's numbers, fp32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from golden_data import assert_close, assert_same_codes, tensors

from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Emission, Engine, Request, Sampling
from warble_mlx.errors import BudgetError, WarbleError
from warble_mlx.layers import check_rope_table, rope_table
from warble_mlx.prompt import Prompt

LIMIT = 1e-4
GREEDY = Sampling(temperature=0)
# case: max_new_tokens of the reference's call
CASES = {"p1": 48, "p2": 48, "p3": 48, "p4": 80, "p5": 48, "p6": 48, "p7": 1, "p8": 8}


def split(columns: np.ndarray, at: int = 7) -> Prompt:
    """Any border between prefix and target must give the same result."""
    return Prompt(columns[:, :at], columns[:, at:])


def requests(golden: dict[str, np.ndarray], case: str, frames: int, at: int = 7) -> list[Request]:
    found = []
    for ids, mask in zip(golden[f"{case}.prompt_ids"], golden[f"{case}.prompt_mask"], strict=True):
        found.append(Request(split(ids[:, mask.astype(bool)], at), frames, GREEDY, 0))
    return found


def collect(emissions: list[Emission], rows: int) -> tuple[list[np.ndarray], dict[int, str | None]]:
    frames: list[list[np.ndarray]] = [[] for _ in range(rows)]
    reasons: dict[int, str | None] = {}
    for e in emissions:
        assert e.request not in reasons, "an emission after the end"
        if e.codes is not None:
            frames[e.request].append(e.codes)
        if e.finish_reason is not None:
            reasons[e.request] = e.finish_reason
    return [np.array(f, np.int32).reshape(-1, 10).T for f in frames], reasons


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return tensors("ar_tiny")


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS can never be chosen: runs end by their budget."""
    scores = DualAR.semantic_logits

    def without_eos(self: DualAR, hidden: mx.array) -> mx.array:
        logits = scores(self, hidden)
        return mx.where(mx.arange(logits.shape[1]) == logits.shape[1] - 1, -mx.inf, logits)

    monkeypatch.setattr(DualAR, "semantic_logits", without_eos)


def test_rope_tables_are_bit_equal(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    c = tiny_dual_ar.config
    for name, length, part in (("slow", c.max_seq_len, c.slow), ("fast", 10, c.fast)):
        table = rope_table(length, part.head_dim, part.rope_base)
        assert np.array_equal(np.array(table), golden[f"rope.{name}"]), name


def test_full_size_rope_table_is_bit_equal() -> None:
    bits = tensors("rope_full")["slow_bits"]
    table = np.array(rope_table(2048, 64, 1e6)).view(np.uint32)
    assert np.array_equal(table >> 16, bits)
    assert not (table & 0xFFFF).any(), "the table must be rounded to bfloat16"


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e38])
def test_a_broken_rope_table_is_refused(value: float) -> None:
    with pytest.raises(WarbleError, match="RoPE"):
        check_rope_table(mx.full((4, 8, 2), value))


def test_embedding_layers_and_logits(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    model, columns = tiny_dual_ar, mx.array(golden["p1.prompt_ids"])
    x = model.embed(columns)
    assert_close(x[0], golden["p1.embedding"], 1e-6, "embedding")
    length = columns.shape[2]
    zero, hole = mx.zeros((1,), mx.int32), mx.zeros((1, 2), mx.int32)
    layers, model.layers = model.layers, []
    try:
        for count in range(1, len(layers) + 1):
            model.layers = layers[:count]
            out, _ = model.advance(x, zero, hole, model.empty_caches(1, length))
            assert_close(out[0], golden[f"p1.layer{count - 1}"], LIMIT, f"layer {count - 1}")
    finally:
        model.layers = layers
    normed = model.norm(out[0])
    assert_close(normed, golden["p1.final_norm"], LIMIT, "final norm")
    assert_close(
        model.semantic_logits(normed[-1:])[0], golden["p1.semantic_logits_last"], LIMIT, "logits"
    )


@pytest.mark.parametrize("case", ["p1", "p4"])
def test_hidden_and_logits_of_every_step(
    tiny_dual_ar: DualAR, golden: dict[str, np.ndarray], case: str
) -> None:
    model, engine = tiny_dual_ar, Engine(tiny_dual_ar, compiled=False)
    c = model.config
    rows = [*range(c.semantic_begin_id, c.semantic_end_id + 1), c.eos_token_id]
    state = engine.prefill(split(golden[f"{case}.prompt_ids"][0]))
    for step, (hidden, logits) in enumerate(
        zip(golden[f"{case}.step_hidden"], golden[f"{case}.step_logits"], strict=True)
    ):
        normed = model.norm(state.hidden)
        assert_close(normed[0], hidden, LIMIT, f"step {step} hidden")
        assert_close(model.semantic_logits(normed)[0], logits[rows], LIMIT, f"step {step} logits")
        _, state = engine.frame_step(state, None, None)


def test_fast_logits_of_every_position(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    """Teacher-forced: the golden hidden states and codes go in."""
    model = tiny_dual_ar
    hidden = mx.array(golden["p1.step_hidden"][:-1])
    codes = mx.array(golden["p1.codes"][0].T)
    x = mx.concatenate([model.fast_input(hidden), model.embed_code(codes[:, 0])], axis=1)
    first, caches = 0, None
    for book in range(1, 10):
        logits, caches = model.fast_pass(x, first, caches)
        assert_close(logits, golden["p1.fast_logits"][:, book], LIMIT, f"fast position {book}")
        first, x = book + 1, model.embed_code(codes[:, book])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_greedy_codes(
    tiny_dual_ar: DualAR,
    compiled_tiny_engine: Engine,
    golden: dict[str, np.ndarray],
    case: str,
    compiled: bool,
) -> None:
    engine = compiled_tiny_engine if compiled else Engine(tiny_dual_ar, compiled=False)
    wanted = requests(golden, case, CASES[case])
    codes, reasons = collect(list(engine.generate(wanted, rows=len(wanted))), len(wanted))
    for row, length in enumerate(golden[f"{case}.code_lengths"]):
        assert_same_codes(codes[row], golden[f"{case}.codes"][row][:, :length], f"{case}[{row}]")
        finished = bool(golden[f"{case}.finished"][row])
        assert reasons[row] == ("stop" if finished else "length")


@pytest.mark.parametrize("at", [1, 32, 53])
def test_the_border_of_the_kept_prefix_changes_nothing(
    tiny_dual_ar: DualAR, golden: dict[str, np.ndarray], at: int
) -> None:
    engine = Engine(tiny_dual_ar, compiled=False)
    for _ in range(2):  # the second time, the prefix comes from the kept KV
        codes, _ = collect(list(engine.generate(requests(golden, "p4", 80, at))), 1)
        assert_same_codes(codes[0], golden["p4.codes"][0], f"prefix of {at}")


def test_rows_are_refilled_from_the_queue(
    tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]
) -> None:
    """Five requests through two rows: each yields what it yields alone."""
    engine = Engine(tiny_dual_ar, compiled=False)
    order = ["p4", "p8", "p1", "p7", "p2"]
    queue = [requests(golden, case, CASES[case])[0] for case in order]
    codes, reasons = collect(list(engine.generate(queue, rows=2)), len(order))
    assert sorted(reasons) == list(range(len(order)))
    for number, case in enumerate(order):
        length = golden[f"{case}.code_lengths"][0]
        assert_same_codes(codes[number], golden[f"{case}.codes"][0][:, :length], case)


@pytest.mark.usefixtures("endless")
def test_caches_grow_past_a_bucket(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    """The same tokens whether the cache grows on the way or is large from the start."""
    whole = []
    for lengths in ((128, 256), (512,)):
        engine = Engine(tiny_dual_ar, compiled=False, cache_lengths=lengths)
        codes, _ = collect(list(engine.generate(requests(golden, "p1", 120))), 1)
        whole.append(codes[0])
    assert whole[0].shape == (10, 120)
    assert_same_codes(whole[0], whole[1], "grown cache")


@pytest.mark.usefixtures("endless")
def test_the_last_frame_of_the_context(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    """Prompt plus frames may fill the context exactly; one frame more is refused with numbers."""
    engine = Engine(tiny_dual_ar, compiled=False)
    room = tiny_dual_ar.config.max_seq_len - golden["p1.prompt_ids"].shape[2]
    codes, reasons = collect(list(engine.generate(requests(golden, "p1", room))), 1)
    assert codes[0].shape[1] == room
    assert reasons[0] == "length"
    with pytest.raises(BudgetError, match=rf"88 positions and {room + 1} frames.*512"):
        list(engine.generate(requests(golden, "p1", room + 1)))
    with pytest.raises(BudgetError, match="at least one frame"):
        list(engine.generate(requests(golden, "p1", 0)))


@pytest.mark.usefixtures("endless")
def test_one_trace_per_cache_length(tiny_dual_ar: DualAR, golden: dict[str, np.ndarray]) -> None:
    """300 frames within two cache lengths: two traces, and none the second time."""
    engine = Engine(tiny_dual_ar, cache_lengths=(256, 512))
    for _ in range(2):
        codes, _ = collect(list(engine.generate(requests(golden, "p1", 300))), 1)
        assert codes[0].shape[1] == 300
        assert engine.traces == 2


def test_damaged_weights_raise_instead_of_speaking(tiny_dual_ar: DualAR) -> None:
    norm = tiny_dual_ar.layers[0].attention_norm
    good = norm.weight
    try:
        norm.weight = mx.full(good.shape, mx.nan)
        columns = np.zeros((11, 40), np.int32)
        with pytest.raises(WarbleError, match="not finite"):
            list(
                Engine(tiny_dual_ar, compiled=False).generate(
                    [Request(split(columns), 4, GREEDY, 0)]
                )
            )
    finally:
        norm.weight = good


@pytest.mark.slow
@pytest.mark.parametrize(("case", "frames"), [("", 12), ("reference.", 6)])
def test_full_size_greedy_codes(full_dual_ar: DualAR, case: str, frames: int) -> None:
    golden = tensors("ar_full")
    engine = Engine(full_dual_ar, compiled=False)
    wanted = [Request(split(golden[f"{case}prompt_ids"][0]), frames, GREEDY, 0)]
    codes, _ = collect(list(engine.generate(wanted)), 1)
    assert_same_codes(codes[0], golden[f"{case}codes"][0], case or "plain")


@pytest.mark.slow
def test_full_size_hidden_and_logits(full_dual_ar: DualAR) -> None:
    golden, model = tensors("ar_full"), full_dual_ar
    state = Engine(model, compiled=False).prefill(split(golden["prompt_ids"][0]))
    normed = model.norm(state.hidden)
    assert_close(normed[0], golden["step_hidden"][0], LIMIT, "hidden")
    assert_close(
        model.semantic_logits(normed)[0], golden["semantic_logits_prefill"], LIMIT, "logits"
    )
