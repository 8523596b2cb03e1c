"""Who does what in a step on a CPU, worked out once for all layers: host numbers of a batch, and tasks over pages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapserve_kernels.types import AttnBatch

MANY_QUERIES = 32
"""Slices of at least this many queries are products in torch; shorter ones go over pages."""
MAX_TILE_ROWS = 64
"""Rows (queries times heads of a group) that share one pass over the keys."""
MIN_PIECE_KEYS = 128
"""Splitting fewer keys than this costs more than it gains."""
PIECES_PER_THREAD = 4
"""Of all keys of a step: no task is longer than one such piece, so that threads end at about the same time."""


@dataclass(frozen=True)
class Tasks:
    """Tasks over pages: (sequence, KV head, first query row, queries, position of the first, keys from, keys to).

    The pieces of one tile of queries and one head are neighbours.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    """Indices into `rows`: the tasks of the first thread, then those of the second, and so on."""
    bounds: NDArray[np.int64]
    """Where each thread's part of `order` begins, and the end of the last."""
    max_rows: int
    """The most queries times heads of a group in one."""


class Step:
    """A batch's numbers on the host, and its tasks over pages, which depend on a layer's heads and window."""

    def __init__(self, batch: AttnBatch) -> None:
        self.batch = batch
        self.starts: list[int] = batch.cu_q.tolist()
        self.lengths: list[int] = batch.kv_len.tolist()
        counts = [end - begin for begin, end in pairwise(self.starts)]
        self.few = [sequence for sequence, count in enumerate(counts) if 0 < count < MANY_QUERIES]
        self.many = [sequence for sequence, count in enumerate(counts) if count >= MANY_QUERIES]
        self.table: Any = batch.block_table.numpy()
        self._tasks: dict[tuple[int, int, int, int], Tasks] = {}

    def tasks(self, num_kv_heads: int, group: int, window: int, num_threads: int) -> Tasks:
        """The tasks of the slices of few queries."""
        key = (num_kv_heads, group, window, num_threads)
        found = self._tasks.get(key)
        if found is None:
            found = self._tasks[key] = self._plan(num_kv_heads, group, window, num_threads)
        return found

    def _plan(self, num_kv_heads: int, group: int, window: int, num_threads: int) -> Tasks:
        """Queries in tiles, and keys in pieces where one tile's are more than a thread's share."""
        max_queries = max(1, MAX_TILE_ROWS // group)
        tiles = []
        for sequence in self.few:
            begin, end, length = self.starts[sequence], self.starts[sequence + 1], self.lengths[sequence]
            for query in range(begin, end, max_queries):
                count = min(max_queries, end - query)
                position = length - (end - query)
                low = max(0, position + 1 - window) if window else 0
                tiles.append((sequence, query, count, position, low, position + count))
        num_keys = num_kv_heads * sum(high - low for *_, low, high in tiles)
        pieces = PIECES_PER_THREAD * num_threads if num_threads > 1 else 1
        longest = max(MIN_PIECE_KEYS, -(-num_keys // pieces))
        tasks = []
        for sequence, query, count, position, low, high in tiles:
            step = -(-(high - low) // -(-(high - low) // longest))
            for head in range(num_kv_heads):
                for begin in range(low, high, step):
                    tasks.append((sequence, head, query, count, position, begin, min(begin + step, high)))
        rows = np.array(tasks, np.int64)
        heaviest_first = np.argsort((rows[:, 5] - rows[:, 6]) * rows[:, 3], kind="stable")
        order, bounds = _deal(heaviest_first, num_threads)
        return Tasks(rows, order, bounds, int(rows[:, 3].max()) * group)


def _deal(heaviest_first: NDArray[np.int64], num_threads: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Deal tasks to threads to and fro, so that each has its part of the heavy ones; `Tasks.order` and `bounds`."""
    places = np.arange(len(heaviest_first)) % (2 * num_threads)
    thread = np.minimum(places, 2 * num_threads - 1 - places)
    hands = np.argsort(thread, kind="stable")
    return heaviest_first[hands], np.searchsorted(thread[hands], np.arange(num_threads + 1))
