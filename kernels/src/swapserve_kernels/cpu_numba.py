"""Attention of few queries over pages, compiled by numba: decodes and drafts to verify, without copying a key.

One task is a piece of one sequence's keys for one KV head and a few queries. Its rows are the queries times the heads
of the group, so that each key is read once for all of them. A task runs through its pages with an online softmax
(Milakov and Gimelshein 2018; Dao et al. 2022), and the pieces of a sequence are joined at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered; NaN and infinity keep their meaning."""
MASKED = np.float32(-1e30)
"""Below any score: what a row's maximum begins with, so that nothing is ever subtracted from -infinity."""


@numba.njit(cache=True, nogil=True)
def write_pages(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
    """Copy `[T, HK, D]` keys and values into caches `[block, HK, page, D]`; slot -1 stores nothing."""
    page = k_cache.shape[2]
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot >= 0:
            block, offset = slot // page, slot % page
            for head in range(k.shape[1]):
                for dim in range(k.shape[2]):
                    k_cache[block, head, offset, dim] = k[token, head, dim]
                for dim in range(v.shape[2]):
                    v_cache[block, head, offset, dim] = v[token, head, dim]


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def _page_scores(q_rows: Any, page_keys: Any, low: int, high: int, softcap: float, scores: Any) -> None:
    """Scores `[rows, high - low]` of scaled query rows against keys [low, high) of one page."""
    head_dim = q_rows.shape[1]
    for row in range(q_rows.shape[0]):
        for key in range(low, high):
            total = np.float32(0.0)
            for dim in range(head_dim):
                total += q_rows[row, dim] * page_keys[key, dim]
            scores[row, key - low] = total
    if softcap > 0:
        for row in range(q_rows.shape[0]):
            for key in range(high - low):
                scores[row, key] = softcap * math.tanh(scores[row, key] / softcap)


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def _add_page(
    scores: Any, first: Any, last: Any, position: int, values: Any, low: int, high: int, top: Any, sums: Any, made: Any
) -> None:
    """Take one page into the running softmax of each row; row r sees positions first[r] to last[r]."""
    width = made.shape[1]
    for row in range(scores.shape[0]):
        begin, end = max(low, first[row] - position), min(high, last[row] + 1 - position)
        if begin >= end:
            continue
        best = top[row]
        for key in range(begin, end):
            best = max(best, scores[row, key - low])
        if best > top[row]:
            shrink = math.exp(top[row] - best)
            top[row] = best
            sums[row] *= shrink
            for dim in range(width):
                made[row, dim] *= shrink
        for key in range(begin, end):
            weight = np.float32(math.exp(scores[row, key - low] - best))
            sums[row] += weight
            for dim in range(width):
                made[row, dim] += weight * values[key, dim]


@numba.njit(cache=True, nogil=True, parallel=True, fastmath=FAST)
def attend_pages(
    tasks: Any, q: Any, k_cache: Any, v_cache: Any, table: Any, scale: float, window: int, softcap: float,
    made: Any, tops: Any, sums: Any,
) -> None:  # fmt: skip
    """Run all tasks; a task is (sequence, KV head, first query row, queries, position of the first, keys from, keys to).

    q `[T, HQ, D]`, caches `[block, HK, page, D]`; `made` `[tasks, rows, D]`, `tops` and `sums` `[tasks, rows]` are its
    unnormalised outcome. Causal: a query sees keys up to its own position, the last `window` of them unless that is 0.
    """
    page, num_kv_heads = k_cache.shape[2], k_cache.shape[1]
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    for task in numba.prange(tasks.shape[0]):
        sequence, head, query, count, position, begin, end = tasks[task]
        rows = count * group
        q_rows = np.empty((rows, head_dim), np.float32)
        first, last = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for row in range(rows):
            at = position + row // group
            last[row] = at
            first[row] = max(0, at + 1 - window) if window > 0 else 0
            for dim in range(head_dim):
                q_rows[row, dim] = q[query + row // group, head * group + row % group, dim] * scale
            tops[task, row] = MASKED
            sums[task, row] = 0.0
            for dim in range(made.shape[2]):
                made[task, row, dim] = 0.0
        scores = np.empty((rows, page), np.float32)
        for index in range(begin // page, (end + page - 1) // page):
            start = index * page
            low, high = max(0, begin - start), min(page, end - start)
            block = table[sequence, index]
            _page_scores(q_rows, k_cache[block, head], low, high, softcap, scores)
            _add_page(
                scores, first, last, start, v_cache[block, head], low, high,
                tops[task, :rows], sums[task, :rows], made[task, :rows],
            )  # fmt: skip


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def join_tasks(tasks: Any, made: Any, tops: Any, sums: Any, sinks: Any, group: int, out: Any, lse: Any) -> None:
    """Join the pieces of each (query, head) and write `out` `[T, HQ, D]` and `lse` `[T, HQ]` (empty: not wanted).

    Pieces of one query and head are neighbours in `tasks`.
    """
    task = 0
    while task < tasks.shape[0]:
        upto = task + 1
        while upto < tasks.shape[0] and tasks[upto, 1] == tasks[task, 1] and tasks[upto, 2] == tasks[task, 2]:
            upto += 1
        for row in range(tasks[task, 3] * group):
            token, head = tasks[task, 2] + row // group, tasks[task, 1] * group + row % group
            best = sinks[head] if sinks.shape[0] > 0 else MASKED
            for piece in range(task, upto):
                best = max(best, tops[piece, row])
            total = math.exp(sinks[head] - best) if sinks.shape[0] > 0 else 0.0
            for piece in range(task, upto):
                total += sums[piece, row] * math.exp(tops[piece, row] - best)
            for dim in range(out.shape[2]):
                out[token, head, dim] = 0.0
            if total > 0.0:
                for piece in range(task, upto):
                    share = np.float32(math.exp(tops[piece, row] - best) / total)
                    for dim in range(out.shape[2]):
                        out[token, head, dim] += share * made[piece, row, dim]
            if lse.shape[0] > 0:
                lse[token, head] = best + math.log(total) if total > 0.0 else -np.inf
        task = upto


def plan_tasks(
    sequences: list[int],
    starts: list[int],
    lengths: list[int],
    num_kv_heads: int,
    window: int,
    max_rows: int,
    num_threads: int,
) -> NDArray[np.int64]:
    """The tasks of some sequences: queries in tiles of `max_rows`, and keys in pieces when there are too few tiles."""
    tiles = []
    for sequence in sequences:
        begin, end, length = starts[sequence], starts[sequence + 1], lengths[sequence]
        for query in range(begin, end, max_rows):
            count = min(max_rows, end - query)
            position = length - (end - query)
            low = max(0, position + 1 - window) if window else 0
            tiles.append((sequence, query, count, position, low, position + count))
    pieces = max(1, -(-2 * num_threads // max(1, len(tiles) * num_kv_heads))) if num_threads > 1 else 1
    tasks = []
    for sequence, query, count, position, low, high in tiles:
        step = max(MIN_PIECE_KEYS, -(-(high - low) // pieces))
        for head in range(num_kv_heads):
            for begin in range(low, high, step):
                tasks.append((sequence, head, query, count, position, begin, min(begin + step, high)))
    return np.array(tasks, np.int64).reshape(-1, 7)


MIN_PIECE_KEYS = 128
"""Splitting fewer keys than this costs more than it gains."""
