"""What the codec's layers carry from one chunk to the next.

Every layer of the codec is causal, so a chunk needs only a fixed number of earlier values of each
layer. They travel as one flat tuple of arrays of fixed shapes, in the order in which the layers
run, so that a step is a pure function of arrays. Zeros are the right beginning everywhere: the
reference pads with zeros on the left, and keys before position 0 are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from warble_mlx.errors import WarbleError

State = tuple[mx.array, ...]


class Carry:
    """Hands the old state to the layers of one step, in order, and collects the new state.

    Without a state each layer is handed zeros of the shape it asks for.
    """

    def __init__(self, state: Sequence[mx.array] | None = None) -> None:
        self._old: Iterator[mx.array] | None = None if state is None else iter(state)
        self.handed: list[mx.array] = []
        self._new: list[mx.array] = []

    def take(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """The next array of the old state, which must be of this shape and dtype."""
        if self._old is None:
            array = mx.zeros(shape, dtype=dtype)
        else:
            found = next(self._old, None)
            if found is None or found.shape != tuple(shape) or found.dtype != dtype:
                what = "nothing" if found is None else f"{found.dtype} {found.shape}"
                raise WarbleError(
                    f"codec state {len(self.handed)} is {what} instead of {dtype} {tuple(shape)}:"
                    " it belongs to another model, batch size or dtype; make a new one with"
                    " initial_state"
                )
            array = found
        self.handed.append(array)
        return array

    def put(self, array: mx.array) -> None:
        """Keep `array` for the next step, in the place of the last one taken."""
        # A slice keeps the whole buffer behind it alive. Adding zero copies it out, and unlike
        # mx.contiguous it can be exported.
        self._new.append(array + 0)

    def extend(self, x: mx.array, length: int, axis: int) -> mx.array:
        """`x` preceded by the `length` values before it along `axis`; its last ones are kept."""
        if length == 0:
            return x
        shape = list(x.shape)
        shape[axis] = length
        joined = mx.concatenate([self.take(shape, x.dtype), x], axis=axis)
        self.put(mx.split(joined, [x.shape[axis]], axis=axis)[1])
        return joined

    def finish(self) -> State:
        """The new state, once every layer has run."""
        if self._old is not None and next(self._old, None) is not None:
            raise WarbleError(
                "the codec state holds more arrays than this model carries: it belongs to another"
                " model; make a new one with initial_state"
            )
        return tuple(self._new)
