"""Attention of few queries over pages, compiled by numba: decodes and drafts to verify, without copying a key.

One task is a piece of one sequence's keys for one KV head and a few queries. Its rows are the queries times the heads
of the group, so that each key is read once for all of them. A task runs through its pages with an online softmax
(Milakov and Gimelshein 2018; Dao et al. 2022), and the pieces of a sequence are joined at the end.

Arithmetic is in float32. A 16-bit cache comes as its bits, bfloat16 as uint16 and float16 as int16, and is widened a
page at a time. Rows are taken four at a time against a key, and values four at a time against a row: each is loaded
once for four products, which the compiler does not find by itself.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

logger = logging.getLogger(__name__)


def _can_keep_code() -> bool:
    """Whether numba finds a folder to keep compiled code in: NUMBA_CACHE_DIR, beside this file, or the user's own."""
    try:
        numba.njit(cache=True)(_can_keep_code)
    except RuntimeError:  # raised at decoration: without this check, importing the package would fail
        logger.warning("numba can write to no cache folder, so every start compiles: set NUMBA_CACHE_DIR to one it can")
        return False
    return True


KEEP_CODE = _can_keep_code()
FAST = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered; NaN and infinity keep their meaning."""
MASKED = np.float32(-1e30)
"""Below any score: what a row's maximum begins with, so that nothing is ever subtracted from -infinity."""
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
SMALLEST_EXPONENT = np.float32(-87.0)
"""Where e^x is still a normal float32; what is smaller counts as this, 1e-38 of the row's greatest."""
HALF_RANGE, HALF_BIAS = np.float32(65536.0), np.float32(2.0**112)
"""Float16's first number too large, and the factor between the exponents of its bits and those of float32."""


@numba.njit(cache=KEEP_CODE, nogil=True)
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


def _floats(rows: Any, low: int, high: int, bits: Any) -> Any:
    """Rows [low, high) as float32, in place: `rows` itself, or `bits` (int32 room) with 16-bit rows widened."""
    return rows


@overload(_floats)
def _compile_floats(rows: Any, low: int, high: int, bits: Any) -> Any:
    def bfloat16(rows: Any, low: int, high: int, bits: Any) -> Any:
        for key in range(low, high):
            for dim in range(rows.shape[1]):
                bits[key, dim] = np.int32(rows[key, dim]) << 16
        return bits.view(np.float32)

    def float16(rows: Any, low: int, high: int, bits: Any) -> Any:
        wide = bits.view(np.float32)
        for key in range(low, high):
            for dim in range(rows.shape[1]):
                half = np.int32(rows[key, dim])
                bits[key, dim] = (half & 0x7FFF) << 13 | (half & 0x8000) << 16
            for dim in range(rows.shape[1]):
                value = wide[key, dim] * HALF_BIAS
                wide[key, dim] = value if abs(value) < HALF_RANGE else value * np.float32(np.inf)
        return wide

    if rows.dtype == numba.uint16:
        return bfloat16
    return float16 if rows.dtype == numba.int16 else _floats


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _page_scores(q_rows: Any, keys: Any, low: int, high: int, softcap: float, scores: Any) -> None:
    """Scores `[rows, high - low]` of scaled query rows against keys [low, high) of one page."""
    num_rows, head_dim = q_rows.shape
    alone = 0
    while num_rows >= 4 and num_rows - alone >= 3:
        row = min(alone, num_rows - 4)  # with three left, one that is done already makes four
        alone = row + 4
        for key in range(low, high):
            total_0 = total_1 = total_2 = total_3 = np.float32(0.0)
            for dim in range(head_dim):
                value = keys[key, dim]
                total_0 += q_rows[row, dim] * value
                total_1 += q_rows[row + 1, dim] * value
                total_2 += q_rows[row + 2, dim] * value
                total_3 += q_rows[row + 3, dim] * value
            scores[row, key - low], scores[row + 1, key - low] = total_0, total_1
            scores[row + 2, key - low], scores[row + 3, key - low] = total_2, total_3
    for row in range(alone, num_rows):
        for key in range(low, high):
            total = np.float32(0.0)
            for dim in range(head_dim):
                total += q_rows[row, dim] * keys[key, dim]
            scores[row, key - low] = total
    if softcap > 0:
        for row in range(num_rows):
            for key in range(high - low):
                scores[row, key] = softcap * math.tanh(scores[row, key] / softcap)


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _exponentials(scores: Any, best: Any, bits: Any) -> Any:
    """Turn scores into e^(score - best), at most 1, in place, and return their sum; `bits` is int32 room.

    2^n (f in [-1/2, 1/2] left over) is made of bits, e^(f ln 2) of its series: unlike a call of `exp`, this vectorises.
    """
    for key in range(scores.shape[0]):
        exponent = scores[key] - best
        exponent = SMALLEST_EXPONENT if exponent < SMALLEST_EXPONENT else exponent  # so that NaN stays NaN
        whole = np.floor(exponent * LOG2_E + np.float32(0.5))
        x = exponent - whole * LN_2
        series = np.float32(1 / 720) + x * np.float32(1 / 5040)
        series = np.float32(1 / 24) + x * (np.float32(1 / 120) + x * series)
        series = np.float32(1.0) + x * (np.float32(1.0) + x * (np.float32(0.5) + x * (np.float32(1 / 6) + x * series)))
        scores[key] = series
        bits[key] = (np.int32(whole) + 127) << 23
    powers, total = bits.view(np.float32), np.float32(0.0)
    for key in range(scores.shape[0]):
        scores[key] *= powers[key]
        total += scores[key]
    return total


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _add_values(weights: Any, values: Any, begin: int, end: int, made: Any) -> None:
    """Add values [begin, end) of a page to `made` `[D]`, weighed; `weights` begins with that of value `begin`."""
    fours = end - (end - begin) % 4
    for key in range(begin, fours, 4):
        weight_0, weight_1 = weights[key - begin], weights[key - begin + 1]
        weight_2, weight_3 = weights[key - begin + 2], weights[key - begin + 3]
        for dim in range(made.shape[0]):
            made[dim] += (
                weight_0 * values[key, dim]
                + weight_1 * values[key + 1, dim]
                + weight_2 * values[key + 2, dim]
                + weight_3 * values[key + 3, dim]
            )
    for key in range(fours, end):
        weight = weights[key - begin]
        for dim in range(made.shape[0]):
            made[dim] += weight * values[key, dim]


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _add_page(
    scores: Any, first: Any, last: Any, position: int, values: Any, low: int, high: int, bits: Any,
    top: Any, sums: Any, made: Any,
) -> None:  # fmt: skip
    """Take one page into the running softmax of each row; row r sees positions first[r] to last[r]."""
    for row in range(first.shape[0]):
        begin, end = max(low, first[row] - position), min(high, last[row] + 1 - position)
        if begin >= end:
            continue
        seen = scores[row, begin - low : end - low]
        best = top[row]
        for key in range(seen.shape[0]):
            best = max(best, seen[key])
        if best > top[row]:
            shrink = np.float32(math.exp(top[row] - best))
            top[row] = best
            sums[row] *= shrink
            for dim in range(made.shape[1]):
                made[row, dim] *= shrink
        sums[row] += _exponentials(seen, best, bits)
        _add_values(seen, values, begin, end, made[row])


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _attend_piece(
    task: Any, q: Any, k_cache: Any, v_cache: Any, table: Any, scale: float, window: int, softcap: float,
    made: Any, top: Any, sums: Any,
) -> None:  # fmt: skip
    """One task, with its own rows of the outcome."""
    sequence, head, query, count, position, begin, end = task
    num_kv_heads, page = k_cache.shape[1], k_cache.shape[2]
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    rows = count * group
    q_rows = np.empty((rows, head_dim), np.float32)
    first, last = np.empty(rows, np.int64), np.empty(rows, np.int64)
    for row in range(rows):
        at = position + row // group
        last[row] = at
        first[row] = max(0, at + 1 - window) if window > 0 else 0
        for dim in range(head_dim):
            q_rows[row, dim] = q[query + row // group, head * group + row % group, dim] * scale
    made[:rows] = 0.0
    own_top, own_sums = np.full(rows, MASKED), np.zeros(rows, np.float32)  # another thread's would share cache lines
    scores, bits = np.empty((rows, page), np.float32), np.empty(page, np.int32)
    widened = np.empty((page, max(head_dim, made.shape[1])), np.int32)
    for index in range(begin // page, (end + page - 1) // page):
        start = index * page
        low, high = max(0, begin - start), min(page, end - start)
        block = table[sequence, index]
        _page_scores(q_rows, _floats(k_cache[block, head], low, high, widened), low, high, softcap, scores)
        values = _floats(v_cache[block, head], low, high, widened)
        _add_page(scores, first, last, start, values, low, high, bits, own_top, own_sums, made)
    top[:rows], sums[:rows] = own_top, own_sums


@numba.njit(cache=KEEP_CODE, nogil=True, parallel=True, fastmath=FAST)
def _attend_tasks(
    tasks: Any, order: Any, bounds: Any, q: Any, k_cache: Any, v_cache: Any, table: Any,
    scale: float, window: int, softcap: float, made: Any, tops: Any, sums: Any,
) -> None:  # fmt: skip
    """Run all tasks; `made` `[tasks, rows, D]`, `tops` and `sums` `[tasks, rows]` are not normalised.

    One turn of the loop is one thread's: numba would deal equal numbers of tasks, whatever their sizes.
    """
    for thread in numba.prange(bounds.shape[0] - 1):
        for task in order[bounds[thread] : bounds[thread + 1]]:
            _attend_piece(
                tasks[task], q, k_cache, v_cache, table, scale, window, softcap, made[task], tops[task], sums[task]
            )


@numba.njit(cache=KEEP_CODE, nogil=True, fastmath=FAST)
def _join_tasks(tasks: Any, made: Any, tops: Any, sums: Any, sinks: Any, group: int, out: Any, lse: Any) -> None:
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
            for piece in range(task, upto):
                share = np.float32(math.exp(tops[piece, row] - best) / total)
                for dim in range(out.shape[2]):
                    added = share * made[piece, row, dim]
                    out[token, head, dim] = added if piece == task else out[token, head, dim] + added
            if lse.shape[0] > 0:
                lse[token, head] = best + math.log(total)
        task = upto


@numba.njit(cache=KEEP_CODE, nogil=True)
def attend_pages(
    tasks: Any, order: Any, bounds: Any, q: Any, k_cache: Any, v_cache: Any, table: Any,
    scale: float, window: int, softcap: float, sinks: Any, made: Any, tops: Any, sums: Any, out: Any, lse: Any,
) -> None:  # fmt: skip
    """Run the tasks of `cpu_tasks.Tasks` and write their queries' rows of `out` and `lse`.

    q and out `[T, HQ, D]`, caches `[block, HK, page, D]`; sinks `[HQ]` and lse `[T, HQ]`, empty: none. `made`
    `[tasks, rows, D]`, `tops` and `sums` `[tasks, rows]` are room. Causal: a query sees keys up to its own position,
    the last `window` of them unless that is 0.
    """
    _attend_tasks(tasks, order, bounds, q, k_cache, v_cache, table, scale, window, softcap, made, tops, sums)
    _join_tasks(tasks, made, tops, sums, sinks, q.shape[1] // k_cache.shape[1], out, lse)
