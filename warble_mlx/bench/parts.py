"""Where a frame's time goes: each part of the step run on its own.

A part alone pays its own evaluation and cannot overlap with the others, so the parts add up to a
little more than the step. Compiled where the step is. Apart from them, since it happens while the
device computes the frame before: what the host needs to build the graph of one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from warble_mlx.bench.graph import step_outputs
from warble_mlx.bench.hardware import ROUNDS, best_seconds
from warble_mlx.engine import Engine, Request, _controls
from warble_mlx.sampling import Settings, choose_code, choose_semantic

IN_FLIGHT = 4


def part_times(engine: Engine, request: Request, *, compiled: bool) -> dict[str, float]:
    """Milliseconds per frame of one row, by part; the best of several rounds each."""
    model, config = engine.model, engine.model.config
    state = engine.prefill(request.prompt)
    seed, settings = _controls([request])
    mx.eval(state, seed, settings)
    normed = model.norm(state.hidden)
    semantic_noise, code_noise = engine.noise(seed, state.frame)
    code = mx.zeros((1,), dtype=mx.int32)
    codes = mx.zeros((1, config.num_codebooks), dtype=mx.int32)
    scores = semantic_noise[0, :, : config.codebook_size].astype(mx.float32)
    mx.eval(normed, semantic_noise, code_noise, scores)

    def head(normed: mx.array) -> mx.array:
        logits = model.semantic_logits(normed)
        return choose_semantic(logits, settings, settings, semantic_noise, state.recent)

    def fast(normed: mx.array) -> mx.array:
        x = mx.concatenate([model.fast_input(normed), model.embed_code(code)], axis=1)
        first, caches, chosen = 0, None, code
        for book in range(1, config.num_codebooks):
            logits, caches = model.fast_pass(x, first, caches)
            first = book + 1
            # Greedy: each pass needs the one before, as in the step.
            chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
            x = model.embed_code(chosen)
        return chosen

    def choices(scores: mx.array) -> mx.array:
        chosen = code
        for uniforms in code_noise:
            own = scores + chosen[:, None].astype(mx.float32)
            chosen = choose_code(own, Settings(*settings), uniforms)
        return chosen

    def slow(code: mx.array, caches: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        return model.advance(model.embed_frame(code, codes), state.slot, state.hole, caches)

    def wrap(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return mx.compile(function) if compiled else function

    noise = mx.compile(engine.noise) if compiled else engine.noise
    run_slow = mx.compile(slow) if compiled else slow
    caches = state.caches
    state = state._replace(caches=[])  # nobody else holds them: they are written in place

    def next_slow() -> mx.array:
        nonlocal caches
        held, caches = caches, []
        hidden, caches = run_slow(code, held)
        return hidden

    run_head, run_fast, run_choices = wrap(head), wrap(fast), wrap(choices)
    builds: dict[str, Callable[[], mx.array]] = {
        "random numbers": lambda: noise(seed, state.frame)[1],
        "semantic head and choice": lambda: run_head(normed),
        f"fast AR, {config.num_codebooks - 1} passes": lambda: run_fast(normed),
        f"{config.num_codebooks - 1} code choices": lambda: run_choices(scores),
        "slow AR": next_slow,
    }
    return {name: 1e3 * best_seconds(build, IN_FLIGHT) for name, build in builds.items()}


def host_ms(engine: Engine, request: Request) -> float:
    """Milliseconds in which the host builds the graph of one step, none of it evaluated."""
    state = engine.prefill(request.prompt)
    mx.eval(state)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        step_outputs(engine, state, request)
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best
