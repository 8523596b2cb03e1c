# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Joining attention over disjoint parts of the keys: splits, a shared prefix, or parts on another device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_parts", "num_rows", "lses_stride_part", "lses_stride_t", "lse_stride_t"],
    do_not_specialize_on_alignment=["lses_ptr", "lse_ptr"],
)
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, num_parts, num_rows,
    outs_stride_part, outs_stride_t, outs_stride_h, lses_stride_part, lses_stride_t,
    out_stride_t, out_stride_h, lse_stride_t,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """BLOCK_R (token, head) rows a program: parts weigh as their sums of exponentials do; lse -inf is not read."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = (rows // NUM_HEADS).to(tl.int64), (rows % NUM_HEADS).to(tl.int64)
    live, dims = rows < num_rows, tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for part in range(num_parts):
        lses = lses_ptr + tl.cast(part, tl.int64) * lses_stride_part + token * lses_stride_t + head
        weight = tl.load(lses, mask=live, other=float("-inf"))
        mask = (weight > float("-inf"))[:, None] & (dims < DIM)[None, :]
        outs = outs_ptr + tl.cast(part, tl.int64) * outs_stride_part + token * outs_stride_t + head * outs_stride_h
        values = tl.load(outs[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, weight)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share, fade = tl.exp(weight - base), tl.exp(top - base)
        acc = acc * fade[:, None] + values * share[:, None]
        total = total * fade + share
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    out = out_ptr + token * out_stride_t + head * out_stride_h
    merged = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out[:, None] + dims[None, :], merged, mask=live[:, None] & (dims < DIM)[None, :])
    if LSE:
        tl.store(lse_ptr + token * lse_stride_t + head, top + tl.log(divisor), mask=live)
