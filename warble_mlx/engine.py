"""Prefill, the frame step, and the one loop that turns prompts into frames.

    prompt columns ──prefill──► State ──frame_step──► (emitted frame, State) ──► …

The frame step is a function of arrays of fixed shape and nothing else: final norm, semantic
choice, the fast AR unrolled over ten positions, the next embedding, one slow AR step. It is
traced once per cache length and mode (greedy or sampled) and then replayed. What grows stays
outside: caches are copied to the next length when a row is about to outgrow them.

Invariants:

* the host never waits for the frame it has just asked for. A frame is read while the next one
  is computed; at EOS that next frame was computed in vain and is dropped;
* rows are independent: their own slot, hole, key, settings and window. A row yields the same
  tokens alone or beside others, up to the summation order of the matrix products;
* random numbers of frame t depend on (seed, t) alone: two draws over the semantic tokens, nine
  over a codebook, always consumed, as the reference does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.dual_ar import DualAR, last_position
from warble_mlx.errors import BudgetError, WarbleError
from warble_mlx.layers import entry, side_by_side
from warble_mlx.prompt import Prompt
from warble_mlx.sampling import NOTHING, Settings, choose_code, choose_semantic, remember

PREFILL_MULTIPLE = 32  # prompts are left-padded to a multiple, so that few lengths occur
CACHE_LENGTHS = (256, 512, 1024, 2048)
KEPT_PREFIXES = 8  # voices whose prefix KV is kept, the least recently used goes first

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; `top_k` counts candidates, `top_p` is the
    probability mass kept. Defaults are the published model's."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Request(NamedTuple):
    """One utterance to generate."""

    prompt: Prompt
    max_frames: int
    sampling: Sampling
    seed: int  # 0 … 2**32 - 1


class Emission(NamedTuple):
    """What became known about one request: a frame, or its end."""

    request: int
    codes: npt.NDArray[np.int32] | None  # [10]
    finish_reason: FinishReason | None


class State(NamedTuple):
    """Everything a frame step reads and writes. B rows."""

    hidden: mx.array  # [B, D], the slow AR's last output before the final norm
    slot: mx.array  # int32 [B], next free cache slot
    hole: mx.array  # int32 [B, 2], cache slots [begin, end) that hold nothing
    recent: mx.array  # uint32 [B, W], repetition window of semantic indices
    frame: mx.array  # int32 [B], frames emitted so far
    caches: list[mx.array]  # per slow layer [2, B, K, S, h]


class Controls(NamedTuple):
    """Per-row inputs of a step that no step changes."""

    seed: mx.array  # uint32 [B]
    settings: Settings


Noise = Callable[[mx.array], tuple[mx.array, mx.array]]
"""frame [B] -> uniforms of the semantic draws [2, B, C + 1] and of the codes [9, B, C]."""


class Engine:
    """Runs one DualAR. Holds the traced steps and the KV of voice prefixes, no other state."""

    def __init__(
        self,
        model: DualAR,
        *,
        compiled: bool = True,
        cache_lengths: tuple[int, ...] = CACHE_LENGTHS,
    ) -> None:
        self.model = model
        self._cache_lengths = cache_lengths
        self._prefixes: OrderedDict[bytes, list[mx.array]] = OrderedDict()
        self.traces = 0  # times a frame step was traced; one per cache length, rows and mode
        wrap: Callable[..., Callable[..., tuple[mx.array, State]]]
        wrap = mx.compile if compiled else _as_it_is
        self._greedy_step = wrap(self._traced_greedy)
        self._sampled_step = wrap(self._traced_sampled)

    # ------------------------------------------------------------------ the frame step

    def frame_step(
        self,
        state: State,
        settings: Settings | None,
        uniforms: tuple[mx.array, mx.array] | None,
    ) -> tuple[mx.array, State]:
        """One frame for every row.

        Returns uint32 [B, 11] (semantic index, C meaning EOS, then ten codes) and the new state.
        Greedy when `settings` and `uniforms` are None.
        """
        model, config = self.model, self.model.config
        normed = model.norm(state.hidden)
        logits = model.semantic_logits(normed)
        if settings is None or uniforms is None:
            semantic = mx.argmax(logits, axis=-1)
        else:
            rescue = settings._replace(
                top_p=mx.full(settings.top_p.shape, config.ras_top_p),
                temperature=mx.full(settings.temperature.shape, config.ras_temperature),
            )
            semantic = choose_semantic(logits, settings, rescue, uniforms[0], state.recent)

        # Positions 0 and 1 of the fast AR are both known now: one pass of length two.
        codes = [mx.minimum(semantic, config.codebook_size - 1)]
        given = normed if config.norm_fastlayer_input else state.hidden
        x = mx.concatenate([model.fast_input(given), model.embed_code(codes[0])], axis=1)
        first, caches = 0, None
        for book in range(1, config.num_codebooks):
            code_logits, caches = model.fast_pass(x, first, caches)
            first = book + 1
            if settings is None or uniforms is None:
                code = mx.argmax(code_logits, axis=-1)
            else:
                code = choose_code(code_logits, settings, entry(uniforms[1], book - 1))
            codes.append(code)
            if book + 1 < config.num_codebooks:
                x = model.embed_code(code)

        emitted = side_by_side([semantic, *codes])
        frame_codes = emitted[:, 1:]
        # A finished row of a batch steps on until it is replaced: it must not leave its cache.
        slot = mx.minimum(state.slot, state.caches[0].shape[3] - 1)
        hidden, slow_caches = model.advance(
            model.embed_frame(semantic, frame_codes), slot, state.hole, state.caches
        )
        return emitted, State(
            hidden=last_position(hidden),
            slot=state.slot + 1,
            hole=state.hole,
            recent=remember(state.recent, semantic, state.frame),
            frame=state.frame + 1,
            caches=slow_caches,
        )

    def noise(self, seed: mx.array, frame: mx.array) -> tuple[mx.array, mx.array]:
        """Uniforms of frame [B] for rows with seed [B]: [2, B, C + 1] and [9, B, C].

        Row by row from the counter-based key (seed, frame): a row's numbers do not depend on
        the rows beside it, nor on how many frames were computed in vain before.
        """
        c = self.model.config
        semantic, codes = 2 * c.head_rows, (c.num_codebooks - 1) * c.codebook_size
        keys = mx.stack([seed, frame.astype(mx.uint32)], axis=1)
        drawn = mx.stack(
            [
                mx.random.uniform(shape=(semantic + codes,), key=entry(keys, b))
                for b in range(len(seed))
            ],
            axis=1,
        )
        return (
            drawn[:semantic].reshape(2, c.head_rows, -1).swapaxes(1, 2),
            drawn[semantic:].reshape(c.num_codebooks - 1, c.codebook_size, -1).swapaxes(1, 2),
        )

    # Traced functions see named tuples as plain ones, hence the unpacking at this border.

    def _traced_greedy(self, state: State) -> tuple[mx.array, State]:
        self.traces += 1
        return self.frame_step(State(*state), None, None)

    def _traced_sampled(
        self, state: State, seed: mx.array, settings: Settings
    ) -> tuple[mx.array, State]:
        self.traces += 1
        state = State(*state)
        return self.frame_step(state, Settings(*settings), self.noise(seed, state.frame))

    # ------------------------------------------------------------------ prefill

    def prefill(self, prompt: Prompt) -> State:
        """Read a prompt; returns the state of one row, ready for its first frame."""
        prefix = self._prefix_caches(prompt.prefix)
        columns = prompt.target
        length, start = columns.shape[1], prompt.prefix.shape[1]
        padding = -length % PREFILL_MULTIPLE
        padded = np.zeros((columns.shape[0], padding + length), np.int32)
        padded[0] = self.model.config.pad_token_id
        padded[:, padding:] = columns
        end = start + padding + length
        caches = _grown(prefix, self._cache_length(end + 1))
        hole = mx.array([[start, start + padding]], dtype=mx.int32)
        slot = mx.array([start], dtype=mx.int32)
        x = self.model.embed(mx.array(padded)[None])
        hidden, caches = self.model.advance(x, slot, hole, caches)
        window = self.model.config.ras_window_size
        return State(
            hidden=last_position(hidden),
            slot=mx.array([end], dtype=mx.int32),
            hole=hole,
            recent=mx.full((1, window), NOTHING, dtype=mx.uint32),
            frame=mx.zeros((1,), dtype=mx.int32),
            caches=caches,
        )

    def _prefix_caches(self, prefix: npt.NDArray[np.int32]) -> list[mx.array]:
        """KV of a voice's prefix, [2, 1, K, P, h] per layer, computed once per voice."""
        key = prefix.tobytes()
        if key not in self._prefixes:
            caches = self.model.empty_caches(1, prefix.shape[1])
            zero = mx.zeros((1,), dtype=mx.int32)
            hole = mx.zeros((1, 2), dtype=mx.int32)
            x = self.model.embed(mx.array(prefix)[None])
            _, caches = self.model.advance(x, zero, hole, caches)
            mx.eval(caches)
            self._prefixes[key] = caches
            while len(self._prefixes) > KEPT_PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(key)
        return self._prefixes[key]

    def release(self) -> None:
        """Forget the kept prefixes and give cached buffers back to the system."""
        self._prefixes.clear()
        mx.clear_cache()

    def _cache_length(self, slots: int) -> int:
        longest = self.model.config.max_seq_len + PREFILL_MULTIPLE
        return next((n for n in self._cache_lengths if slots <= n < longest), longest)

    # ------------------------------------------------------------------ the loop

    def check_budget(self, request: Request) -> None:
        """Raise BudgetError unless prompt and frames fit into the context, WarbleError if no
        frame is wanted at all."""
        prompt = request.prompt.columns.shape[1]
        limit = self.model.config.max_seq_len
        if request.max_frames < 1:
            raise BudgetError(f"at least one frame must be allowed, not {request.max_frames}")
        if prompt + request.max_frames > limit:
            raise BudgetError(
                f"the prompt has {prompt} positions and {request.max_frames} frames are wanted,"
                f" but the context holds {limit}: shorten the text or the reference clip, or"
                f" allow at most {max(limit - prompt, 0)} frames"
            )

    def generate(self, requests: Iterable[Request], rows: int = 1) -> Iterator[Emission]:
        """Generate every request, `rows` of them at a time; finished rows are refilled.

        Yields frames as they become known, each request's in order, and one end per request
        (`stop` after EOS, `length` when max_frames were emitted). Closing the iterator stops
        at once.

        Raises BudgetError before the request's first frame, WarbleError when the scores are
        not finite.
        """
        queue = enumerate(requests)
        batch = Batch(self, rows)
        while True:
            while batch.room:
                following = next(queue, None)
                if following is None:
                    break
                batch.join(*following)
            if batch.idle:
                return
            yield from batch.step()


@dataclass(eq=False)
class _Row:
    number: int
    wanted: Request
    start: int  # cache slot of its first frame
    asked: int = 0  # frames asked of the device
    known: int = 0  # frames read back
    ended: bool = False

    @property
    def wants_more(self) -> bool:
        return self.asked < self.wanted.max_frames


class Batch:
    """Rows that step together, and the host's view of them. Rows join and leave between steps.

    rows: how many there may be at once. elastic: step as many rows as are in use, rounded up to a
    power of two, and no caches longer than those need. Else always all of them: fewer shapes
    occur, and idle rows cost as much as busy ones.
    """

    def __init__(self, engine: Engine, rows: int, *, elastic: bool = False) -> None:
        self._engine = engine
        self._most, self._elastic = rows, elastic
        self._rows: list[_Row | None] = [None] * (1 if elastic else rows)
        self._state: State | None = None
        self._controls: Controls | None = None
        self._greedy = True
        self._pending: tuple[mx.array, list[_Row | None]] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being generated."""
        return self._busy == 0

    @property
    def room(self) -> int:
        """How many more requests may join."""
        return self._most - self._busy

    @property
    def _busy(self) -> int:
        return sum(row is not None for row in self._rows)

    def join(self, number: int, request: Request) -> None:
        """Prefill a request into a free row; its emissions will bear `number`, unlike any other's.

        Raises BudgetError, and WarbleError for scores that are not finite; then nothing joined.
        """
        engine = self._engine
        engine.check_budget(request)
        one = engine.prefill(request.prompt)
        if not mx.isfinite(one.hidden).all().item():
            raise WarbleError(
                "the model's scores are not finite: the weights are damaged or this MLX build"
                " computes wrong values; run `warble doctor`"
            )
        if self._elastic and None not in self._rows:
            self._resize(min(2 * len(self._rows), self._most))
        row = self._rows.index(None)
        if len(self._rows) == 1:
            self._state = one
        else:
            self._state = self._with_row(row, one)
        self._rows[row] = _Row(number, request, np.array(one.slot).item())
        self._settle()

    def leave(self, number: int) -> None:
        """Give up a request, if it has not ended: nothing more of it will be emitted."""
        for i, row in enumerate(self._rows):
            if row is not None and row.number == number:
                self._end(i, row)

    def _end(self, place: int, row: _Row) -> None:
        row.ended = True
        self._rows[place] = None

    def _settle(self) -> None:
        """Make the controls those of the rows as they are."""
        filled = [r.wanted for r in self._rows if r is not None]
        self._greedy = all(r.sampling.greedy for r in filled)
        self._controls = _controls([r.wanted if r else filled[0] for r in self._rows])

    def _resize(self, rows: int) -> None:
        """Busy rows first, then copies of the first as empty ones; caches as long as needed."""
        assert self._state is not None
        kept = [i for i, row in enumerate(self._rows) if row is not None]
        places = mx.array((kept + [kept[0]] * rows)[:rows])
        self._rows = [self._rows[i] for i in kept] + [None] * (rows - len(kept))
        state = _each(lambda a, axis: mx.take(a, places, axis=axis), self._state)
        slots = self._slots_needed()
        self._state = state._replace(caches=[c[:, :, :, :slots] for c in state.caches])
        self._settle()

    def _slots_needed(self) -> int:
        highest = max(r.start + r.asked for r in self._rows if r is not None)
        return self._engine._cache_length(highest + 1)

    def _with_row(self, row: int, one: State) -> State:
        """The batch's state with `one` in place of a row. Empty rows are copies of it."""
        rows = len(self._rows)
        if self._state is None:
            return _each(lambda a, axis: mx.repeat(a, rows, axis=axis), one)
        slots = max(s.caches[0].shape[3] for s in (one, self._state))
        own, one = (s._replace(caches=_grown(s.caches, slots)) for s in (self._state, one))

        def put(old: mx.array, new: mx.array, axis: int) -> mx.array:
            before, after = mx.split(old, [row], axis=axis)
            return mx.concatenate([before, new, mx.split(after, [1], axis=axis)[1]], axis=axis)

        return _each(put, own, one)

    def step(self) -> Iterator[Emission]:
        """Ask for the next frame of every row, then yield what the previous one brought."""
        asked = None
        if any(row is not None and row.wants_more for row in self._rows):
            if self._elastic and 2 * self._busy <= len(self._rows):
                self._resize(1 << (self._busy - 1).bit_length())
            asked = self._ask()
        previous, self._pending = self._pending, asked
        if previous is not None:
            yield from self._read(*previous)

    def _ask(self) -> tuple[mx.array, list[_Row | None]]:
        assert self._state is not None
        assert self._controls is not None
        engine, slots = self._engine, self._slots_needed()
        if slots > self._state.caches[0].shape[3]:
            self._state = self._state._replace(caches=_grown(self._state.caches, slots))
        state, self._state = self._state, None
        if self._greedy:
            emitted, state = engine._greedy_step(state)
        else:
            emitted, state = engine._sampled_step(state, *self._controls)
        # Nobody holds the old caches now, so that the step can write into them.
        self._state = State(*state)
        del state
        mx.async_eval(emitted, self._state)
        wanting = [row if row is not None and row.wants_more else None for row in self._rows]
        for row in wanting:
            if row is not None:
                row.asked += 1
        return emitted, wanting

    def _read(self, emitted: mx.array, rows: list[_Row | None]) -> Iterator[Emission]:
        values = np.array(emitted).astype(np.int32)
        eos = self._engine.model.config.codebook_size
        for value, row in zip(values, rows, strict=True):
            if row is None or row.ended:
                continue  # finished before: this frame was computed in vain
            if value[0] == eos:
                self._end(self._rows.index(row), row)
                yield Emission(row.number, None, "stop")
                continue
            row.known += 1
            last = row.known == row.wanted.max_frames
            if last:
                self._end(self._rows.index(row), row)
            yield Emission(row.number, value[1:], None)
            if last:
                yield Emission(row.number, None, "length")


def _as_it_is(
    function: Callable[..., tuple[mx.array, State]],
) -> Callable[..., tuple[mx.array, State]]:
    return function


def _controls(requests: list[Request]) -> Controls:
    """Arrays of the rows' settings. A greedy row among sampled ones keeps one candidate."""
    samplings = [r.sampling for r in requests]
    return Controls(
        mx.array([r.seed for r in requests], dtype=mx.uint32),
        Settings(
            mx.array([1 if s.greedy else s.top_k for s in samplings], dtype=mx.int32),
            mx.array([s.top_p for s in samplings], dtype=mx.float32),
            mx.array([s.temperature for s in samplings], dtype=mx.float32),
        ),
    )


def _each(function: Callable[..., mx.array], *states: State) -> State:
    """A state made field by field: `function` of the same field of each state and of the axis
    that counts rows."""
    fields = {
        name: function(*(getattr(s, name) for s in states), 0)
        for name in State._fields
        if name != "caches"
    }
    caches = zip(*(s.caches for s in states), strict=True)
    return State(**fields, caches=[function(*layer, 1) for layer in caches])


def _grown(caches: list[mx.array], slots: int) -> list[mx.array]:
    """Caches with room for `slots`, new slots zero."""
    more = slots - caches[0].shape[3]
    if more <= 0:
        return list(caches)
    return [mx.pad(c, [(0, 0), (0, 0), (0, 0), (0, more), (0, 0)]) for c in caches]
