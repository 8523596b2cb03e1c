"""Attention of one sequence at a time in torch: matrix products over a run of its keys, in blocks of queries.

For prompts and pieces of prompts this is as fast as a CPU gets: the products are large, and copying a sequence's
keys side by side costs little beside them. A block of queries looks only at the keys that it can see, so a sliding
window is cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from swapserve_kernels.reference import visible
from swapserve_kernels.types import AttnBatch, KVView

BLOCK_QUERIES = 128
"""Queries of a sequence taken together: small enough that a causal or windowed block sees few keys in vain."""


def attend_sequences(
    sequences: list[int],
    starts: list[int],
    lengths: list[int],
    q: Tensor,
    kv: KVView,
    batch: AttnBatch,
    out: Tensor,
    lse: Tensor | None,
    *,
    sm_scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Fill `out` `[T, HQ, D]` (and `lse`) for some sequences of a batch; `starts` and `lengths` are host copies."""
    num_kv_heads = kv.k.shape[2]
    fused = not softcap and sinks is None and lse is None and batch.tree_mask is None and causal
    for sequence in sequences:
        begin, end, length = starts[sequence], starts[sequence + 1], lengths[sequence]
        context = length - (end - begin)
        first = max(0, context + 1 - window) if window else 0
        keys, values = (_run(cache, batch.block_table[sequence], first, length) for cache in (kv.k, kv.v))
        tree = None if batch.tree_mask is None else batch.tree_mask[begin:end]
        for low in range(0, end - begin, BLOCK_QUERIES):
            high = min(low + BLOCK_QUERIES, end - begin)
            left = max(first, context + low + 1 - window) if window else 0
            right = context + high if causal and tree is None else length
            mask = _mask(low, high, context, length, right, causal, window, tree)[:, left:]
            near, far = keys[:, left - first : right - first], values[:, left - first : right - first]
            rows = slice(begin + low, begin + high)
            if fused:
                _fused_block(q[rows], near, far, mask, out[rows], sm_scale)
            else:
                _block(
                    q[rows], near, far, mask, num_kv_heads,
                    out[rows], None if lse is None else lse[rows], sm_scale, softcap, sinks,
                )  # fmt: skip


def _run(cache: Tensor, table: Tensor, first: int, length: int) -> Tensor:
    """Positions [first, length) of a sequence side by side, float32 `[HK, length - first, D]`."""
    page = cache.shape[1]
    low = first // page
    blocks = cache.transpose(1, 2).index_select(0, table[low : -(-length // page)])
    run = blocks.transpose(0, 1).reshape(cache.shape[2], -1, cache.shape[3])
    return run[:, first - low * page : length - low * page].to(torch.float32)


def _mask(
    low: int, high: int, context: int, length: int, right: int, causal: bool, window: int, tree: Tensor | None
) -> Tensor:
    """Which of the keys [0, right) each of the queries [low, high) of a sequence sees: bool `[high - low, right]`."""
    if tree is None and causal:
        return visible(high - low, right, causal, window, None, torch.device("cpu"))
    return visible(length - context, length, causal, window, tree, torch.device("cpu"))[low:high]


def _fused_block(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, sm_scale: float) -> None:
    """One block through torch's own fused attention, for what it can do: no soft cap, no sinks, no log-sum."""
    made = scaled_dot_product_attention(
        q.to(torch.float32).transpose(0, 1)[None], keys[None], values[None], mask, scale=sm_scale, enable_gqa=True
    )
    out.copy_(made[0].transpose(0, 1))


def _block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    num_kv_heads: int,
    out: Tensor,
    lse: Tensor | None,
    sm_scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """One block of queries `[n, HQ, D]` against keys `[HK, L, D]`: the heads of a group are rows of one product."""
    count, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    rows = q.to(torch.float32).view(count, num_kv_heads, group, head_dim).transpose(0, 1)
    scores = torch.bmm(rows.reshape(num_kv_heads, count * group, head_dim) * sm_scale, keys.transpose(1, 2))
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    shaped = scores.view(num_kv_heads, count, group, -1)
    shaped.masked_fill_(~mask[None, :, None, :], float("-inf"))
    if sinks is not None:
        sink = sinks.to(torch.float32).view(num_kv_heads, 1, group, 1).expand(-1, count, -1, -1)
        shaped = torch.cat([shaped, sink], dim=3)
    weights = torch.softmax(shaped, dim=3)
    if sinks is None and not bool(mask.any(1).all()):
        weights = weights.nan_to_num(0.0)
    weights = weights[..., : keys.shape[1]].reshape(num_kv_heads, count * group, -1)
    made = torch.bmm(weights, values).view(num_kv_heads, count, group, -1).transpose(0, 1)
    out.copy_(made.reshape(count, num_heads, -1))
    if lse is not None:
        lse.copy_(shaped.logsumexp(3).permute(1, 0, 2).reshape(count, num_heads))
