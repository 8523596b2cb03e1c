"""The definition of the attention contract, in plain torch: slow, and easy to check by reading.

Every other backend is tested against this one, run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swapserve_kernels.types import AttnBatch, KVView


class ReferenceBackend:
    """One sequence after another, one plain softmax each."""

    name = "reference"

    def allocate(
        self,
        num_blocks: int,
        page: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVView:
        """An empty cache of one layer, in the memory order that suits the backend."""
        shape = (num_blocks, page, num_kv_heads, head_dim)
        return KVView(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Pay what the first call would cost, before any request waits for it. Nothing here."""

    def write_kv(self, k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
        """Store `[T, HK, D]` keys and values at `slots`, int64 `[T]`; -1 stores nothing."""
        write_kv(k, v, kv, slots)

    def attention_varlen(
        self,
        q: Tensor,
        kv: KVView,
        batch: AttnBatch,
        *,
        sm_scale: float,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of `q` `[T, HQ, D]` over each sequence's own keys; see `attention_varlen` of this module."""
        return attention_varlen(
            q,
            kv,
            batch,
            sm_scale=sm_scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            lse=lse,
        )

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Join attention over parts of the keys; see `merge_states` of this module."""
        merge_states(outs, lses, out, lse)


def write_kv(k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
    """Store `[T, HK, D]` keys and values at `slots`, int64 `[T]`; -1 stores nothing."""
    if kv.k_scale is not None or kv.v_scale is not None:
        raise ValueError("8-bit caches are not supported by this backend: use a 16-bit or 32-bit one")
    kept = slots >= 0
    block, offset = slots[kept] // kv.page, slots[kept] % kv.page
    kv.k[block, offset] = k[kept].to(kv.k.dtype)
    kv.v[block, offset] = v[kept].to(kv.v.dtype)


def attention_varlen(
    q: Tensor,
    kv: KVView,
    batch: AttnBatch,
    *,
    sm_scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Softmax attention of `q` `[T, HQ, D]` over each sequence's own keys; returns `[T, HQ, Dv]` in q's dtype.

    causal: a query sees no key after its own position (or, with `tree_mask`, what its bits say of the new ones).
    window: of the keys up to its own a query sees the last `window`; 0: all.
    softcap: scores become `softcap * tanh(score / softcap)`; 0: as they are.
    sinks: float32 `[HQ]`, one score a head that takes part in the softmax and has no value.
    lse: float32 `[T, HQ]`, filled with the natural log of the softmax's denominator.
    A query that sees nothing gets 0, and -inf as `lse`.
    """
    num_heads, num_kv_heads = q.shape[1], kv.k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    if out is None:
        out = q.new_empty(q.shape[0], num_heads, kv.v.shape[3])
    starts = batch.cu_q.tolist()
    for sequence, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        length = int(batch.kv_len[sequence])
        if begin == end:
            continue
        keys, values = (_gather(cache, batch.block_table[sequence], length).to(exact) for cache in (kv.k, kv.v))
        group = num_heads // num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("thd,khd->htk", q[begin:end].to(exact), keys) * sm_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        tree = None if batch.tree_mask is None else batch.tree_mask[begin:end]
        seen = visible(end - begin, length, causal, window, tree, q.device)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(exact)[:, None, None].expand(-1, end - begin, 1)], dim=2)
        weights = torch.softmax(scores, dim=2).nan_to_num(0.0)[:, :, :length]
        out[begin:end] = torch.einsum("htk,khd->thd", weights, values).to(out.dtype)
        if lse is not None:
            lse[begin:end] = scores.logsumexp(2).T.to(lse.dtype)
    return out


def visible(
    num_queries: int, length: int, causal: bool, window: int, tree: Tensor | None, device: torch.device
) -> Tensor:
    """Which of `length` keys each of the last `num_queries` positions sees: bool `[num_queries, length]`."""
    key = torch.arange(length, device=device)
    position = torch.arange(length - num_queries, length, device=device)[:, None]
    if tree is not None:
        new = key - (length - num_queries)
        bits = tree.to(torch.int64)[:, new.clamp(min=0) // 32] >> (new.clamp(min=0) % 32) & 1
        seen = (new < 0) | (bits == 1)
    elif causal:
        seen = key <= position
    else:
        seen = torch.ones(num_queries, length, dtype=torch.bool, device=device)
    return seen & (key > position - window) if window else seen


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    """Join attention over N disjoint parts of the keys, `outs` `[N, T, HQ, D]` with `lses` `[N, T, HQ]`, into `out`.

    Each part's output is normalised on its own; the parts weigh as their sums of exponentials do. `lse` `[T, HQ]` gets
    the whole's. Parts that saw nothing (lse -inf) weigh nothing.
    """
    whole = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - whole).nan_to_num(0.0)
    out.copy_((outs * weights[..., None]).sum(0))
    if lse is not None:
        lse.copy_(whole)


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` slots of a sequence, `[length, HK, D]`."""
    page = cache.shape[1]
    blocks = table[: -(-length // page)].long()
    return cache[blocks].flatten(0, 1)[:length]
