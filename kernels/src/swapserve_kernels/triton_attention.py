# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over paged keys as one Triton kernel: prompts, pieces of prompts, decodes and drafts, mixed in one launch.

A program takes BLOCK_M rows of one KV head. Rows are (query, head of the group) packed, so that the heads which share
keys share their loads. It goes over its keys BLOCK_N at a time with a running softmax (Milakov and Gimelshein 2018;
FlashAttention-2, Dao 2023) in base 2. Programs find their sequence by binary search of `cu_q`, so the grid follows from
host numbers alone; splitting the keys among programs serves short slices (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _find_sequence(cu_q_ptr, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """The sequence of a tile: `s` has the tiles from `cu_q[s] // BLOCK_Q + s` on, at least as many as it needs."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_q_ptr + middle) // BLOCK_Q + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _find_slots(table_row, start, keys, live, page, ONE_PAGE: tl.constexpr):
    """Block and slot in it of a tile's keys, int64; blocks of keys that are not `live` are not looked up."""
    if ONE_PAGE:
        block = tl.load(table_row + start // page)
        slot = start % page + (keys - start)
    else:
        block = tl.load(table_row + keys // page, mask=live, other=0)
        slot = keys % page
    return block.to(tl.int64), slot.to(tl.int64)


@triton.jit
def _soft_cap(scores, softcap):
    """`softcap * tanh(scores / softcap)`, by an exponential that cannot overflow."""
    ratio = tl.abs(scores) / softcap
    decay = tl.exp2(ratio * (-2.0 * LOG2_E))
    bent = softcap * (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def _tree_bits(tree_rows, keys, context, num_queries, live_rows):
    """Which keys a row's bits show it, `[BLOCK_M, BLOCK_N]`: all of the context, and the new keys whose bit is set."""
    new = keys - context
    drafted = (new >= 0) & (new < num_queries)
    words = tl.load(tree_rows[:, None] + (new // 32)[None, :], mask=live_rows[:, None] & drafted[None, :], other=0)
    return (new < 0)[None, :] | (((words >> (new % 32)[None, :]) & 1) == 1)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "page", "window", "table_stride", "tree_stride", "lse_stride_split", "lse_stride_t",
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "tree_ptr", "cu_q_ptr", "kv_len_ptr", "table_ptr", "lse_ptr"],
)  # fmt: skip
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, tree_ptr, cu_q_ptr, kv_len_ptr, table_ptr,
    num_seqs, page, window, sm_scale, softcap,
    q_stride_t, q_stride_h, k_stride_block, k_stride_slot, k_stride_h, v_stride_block, v_stride_slot, v_stride_h,
    out_stride_split, out_stride_t, out_stride_h, lse_stride_split, lse_stride_t, table_stride, tree_stride,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr,
    LSE: tl.constexpr, ONE_PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of rows × one KV head × one split of the keys; grid (tiles, KV heads, splits).

    UPCAST: all arithmetic in float32, for types that differ and for what the interpreter cannot do in bfloat16.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = _find_sequence(cu_q_ptr, num_seqs, tile, BLOCK_Q)
    begin = tl.load(cu_q_ptr + sequence)
    num_queries = tl.load(cu_q_ptr + sequence + 1) - begin
    first_query = (tile - begin // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= num_queries:
        return
    length = tl.load(kv_len_ptr + sequence)
    context = length - num_queries

    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live_rows = (query < num_queries) & (rows < BLOCK_Q * GROUP)
    token = (begin + query).to(tl.int64)
    position = context + query
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_mask = live_rows[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q_ptr + token * q_stride_t + head * q_stride_h
    q = tl.load(q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # The keys that some row of the tile sees; what lies outside is never loaded: it may be freed, or never written.
    last = length
    if CAUSAL and not TREE:
        last = tl.minimum(length, context + first_query + BLOCK_Q)
    first = 0
    if WINDOWED:
        first = tl.maximum(context + first_query - window + 1, 0)
    num_tiles = tl.maximum(tl.cdiv(last, BLOCK_N) - first // BLOCK_N, 0)
    share = tl.cdiv(num_tiles, tl.num_programs(2))
    start_at = (first // BLOCK_N + split * share) * BLOCK_N
    stop_at = tl.minimum(last, start_at + share * BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and split == 0:
        top = tl.load(sinks_ptr + head, mask=live_rows, other=0.0) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table_row = table_ptr + sequence.to(tl.int64) * table_stride
    k_head, v_head = k_ptr + kv_head.to(tl.int64) * k_stride_h, v_ptr + kv_head.to(tl.int64) * v_stride_h
    for start in range(start_at, stop_at, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= first) & (keys < last)
        block, slot = _find_slots(table_row, start, keys, live, page, ONE_PAGE)
        k_rows = k_head + block * k_stride_block + slot * k_stride_slot
        v_rows = v_head + block * v_stride_block + slot * v_stride_slot
        k = tl.load(k_rows[None, :] + dims[:, None], mask=live[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        # Values of keys that no one sees must be 0, not merely weigh 0: 0 × NaN is NaN.
        v_mask = live[:, None] & (value_dims < VALUE_DIM)[None, :]
        v = tl.load(v_rows[:, None] + value_dims[None, :], mask=v_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)

        scores = tl.dot(q, k, input_precision="ieee") * sm_scale
        if SOFTCAP:
            scores = _soft_cap(scores, softcap)
        seen = live[None, :]
        if TREE:
            tree_rows = tree_ptr + token * tree_stride
            seen = seen & _tree_bits(tree_rows, keys, context, num_queries, live_rows)
        elif CAUSAL:
            seen = seen & (keys[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has a top of -inf; subtracting it from itself would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    out_rows = out_ptr + split.to(tl.int64) * out_stride_split + token * out_stride_t + head * out_stride_h
    out_mask = live_rows[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out_rows[:, None] + value_dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if LSE:
        lse_rows = lse_ptr + split.to(tl.int64) * lse_stride_split + token * lse_stride_t + head
        tl.store(lse_rows, (top + tl.log2(divisor)) * LN_2, mask=live_rows)
