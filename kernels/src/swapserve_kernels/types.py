"""The tensors of the attention contract: one layer's cache, and what a step asks of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVView:
    """One layer's keys and values: `[num_blocks, page, HK, D]` in any memory order whose last dimension has stride 1.

    Slot `s` is `[s // page, s % page]`. What unused slots hold is never looked at, not even if it is NaN.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    """Float32 `[1]` or `[num_blocks, page, HK]`, for 8-bit caches only."""
    v_scale: Tensor | None = None

    @property
    def page(self) -> int:
        """Slots in a block."""
        return self.k.shape[1]


@dataclass(frozen=True)
class AttnBatch:
    """Which queries see which keys: built once a step, the same for all layers.

    Sequence `s` has the queries `cu_q[s]` to `cu_q[s + 1]`, which are the last ones of its `kv_len[s]` keys: query `i`
    of `n` stands at position `kv_len - n + i`.
    """

    cu_q: Tensor
    """int32 `[S + 1]`: where each sequence's queries begin; a sequence may have none."""
    kv_len: Tensor
    """int32 `[S]`: keys after this step's write."""
    block_table: Tensor
    """int32 `[S, max_blocks]`: the block of each `page` keys; entries past `kv_len` are never read."""
    slots: Tensor
    """int64 `[T]`: where each new token's key and value go; -1: nowhere."""
    tree_mask: Tensor | None
    """int32 `[T, ceil(max_q / 32)]`: bit `j` of a row says whether it sees its sequence's query `j`; None: causal."""
    max_q: int
    """The most queries of a sequence: a host number, so that no one reads the device."""
    max_kv: int
    """The most keys of a sequence."""
