"""Who does what in a step on a CPU, worked out once for all layers: host numbers of a batch, and tasks over pages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapserve_kernels.types import AttnBatch

MANY_QUERIES = 24
"""Slices of at least this many queries are products in torch; shorter ones go over pages."""
MAX_TILE_ROWS = 64
"""Rows (queries times heads of a group) that share one pass over the keys."""
MIN_PIECE_KEYS = 128
"""Splitting fewer keys than this costs more than it gains."""


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
        self._tasks: dict[tuple[int, int, int, int], tuple[NDArray[np.int64], int]] = {}

    def tasks(self, num_kv_heads: int, group: int, window: int, num_threads: int) -> tuple[NDArray[np.int64], int]:
        """The tasks of the slices of few queries, as `cpu_numba.attend_pages` takes them, and the most rows of one."""
        key = (num_kv_heads, group, window, num_threads)
        found = self._tasks.get(key)
        if found is None:
            tasks = self._plan(num_kv_heads, max(1, MAX_TILE_ROWS // group), window, num_threads)
            found = self._tasks[key] = tasks, int(tasks[:, 3].max()) * group
        return found

    def _plan(self, num_kv_heads: int, max_queries: int, window: int, num_threads: int) -> NDArray[np.int64]:
        """Queries in tiles of `max_queries`, and keys in pieces when there are too few tiles for the threads."""
        tiles = []
        for sequence in self.few:
            begin, end, length = self.starts[sequence], self.starts[sequence + 1], self.lengths[sequence]
            for query in range(begin, end, max_queries):
                count = min(max_queries, end - query)
                position = length - (end - query)
                low = max(0, position + 1 - window) if window else 0
                tiles.append((sequence, query, count, position, low, position + count))
        pieces = max(1, -(-2 * num_threads // (len(tiles) * num_kv_heads))) if num_threads > 1 else 1
        tasks = []
        for sequence, query, count, position, low, high in tiles:
            step = max(MIN_PIECE_KEYS, -(-(high - low) // pieces))
            for head in range(num_kv_heads):
                for begin in range(low, high, step):
                    tasks.append((sequence, head, query, count, position, begin, min(begin + step, high)))
        return np.array(tasks, np.int64)
