"""The processes of a batch: which rows each one does, and how rank 0 learns of all results.

Under `mx.distributed` (`mlx.launch …`) there are several, else one. Every process reads the whole
input and comes to the same division, so nothing is sent before the end.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

_Item = TypeVar("_Item")


class Ranks:
    """The group of processes that this one belongs to."""

    def __init__(self) -> None:
        self._group = mx.distributed.init()
        self.rank: int = self._group.rank()
        self.size: int = self._group.size()

    def share(self, items: Sequence[_Item], weights: Sequence[int]) -> list[_Item]:
        """This process's items, heaviest first: each goes to the process with least so far."""
        loads = [(0, rank) for rank in range(self.size)]
        own = []
        for i in sorted(range(len(items)), key=lambda i: (-weights[i], i)):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + weights[i], rank))
            if rank == self.rank:
                own.append(items[i])
        return own

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (as JSON can hold it), in the order of ranks, in all of them.

        It returns when all have called it.
        """
        if self.size == 1:
            return [value]
        raw = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.array(self._all(mx.array([raw.size], dtype=mx.int32)))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: raw.size] = raw
        rows = np.array(self._all(mx.array(padded))).reshape(self.size, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _all(self, array: mx.array) -> mx.array:
        gathered: mx.array = mx.distributed.all_gather(array, group=self._group)
        mx.eval(gathered)
        return gathered
