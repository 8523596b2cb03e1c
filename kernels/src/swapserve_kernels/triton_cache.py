# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Writing a step's new keys and values into their slots of the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_rows(
    from_ptr, to_ptr, token, head, slot, page, live, from_stride_t, from_stride_h, stride_block, stride_slot, stride_h,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK)
    mask = live[:, None] & (dims < DIM)[None, :]
    source = from_ptr + token * from_stride_t + head * from_stride_h
    target = to_ptr + slot // page * stride_block + slot % page * stride_slot + head * stride_h
    rows = tl.load(source[:, None] + dims[None, :], mask=mask)
    tl.store(target[:, None] + dims[None, :], rows.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "page"], do_not_specialize_on_alignment=["slots_ptr"])
def write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, num_tokens, page,
    k_from_stride_t, k_from_stride_h, v_from_stride_t, v_from_stride_h,
    k_stride_block, k_stride_slot, k_stride_h, v_stride_block, v_stride_slot, v_stride_h,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R (token, head) rows a program; a slot of -1 stores nothing."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = (rows // NUM_HEADS).to(tl.int64), (rows % NUM_HEADS).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    _copy_rows(
        k_ptr, k_cache_ptr, token, head, slot, page, live, k_from_stride_t, k_from_stride_h,
        k_stride_block, k_stride_slot, k_stride_h, KEY_DIM, BLOCK_D,
    )  # fmt: skip
    _copy_rows(
        v_ptr, v_cache_ptr, token, head, slot, page, live, v_from_stride_t, v_from_stride_h,
        v_stride_block, v_stride_slot, v_stride_h, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
