"""The cases every attention backend is held to, and the problem that each of them makes.

A problem's pool is hostile: every slot that no sequence owns is NaN, blocks are dealt out in shuffled order, the first
and the last block of the pool belong to no one, and table entries past a sequence's length point there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from swapserve_kernels import AttnBatch, KVView
from swapserve_kernels.reference import attention_varlen, write_kv

Spans = tuple[tuple[int, int], ...]

PREFILL: Spans = ((5, 5), (17, 17), (40, 40))
CHUNK: Spans = ((7, 20), (13, 45), (26, 70))
DECODE: Spans = ((1, 1), (1, 16), (1, 17), (1, 100))
VERIFY: Spans = ((4, 20), (6, 33), (1, 9))
MIXED: Spans = ((1, 33), (0, 12), (24, 40), (5, 21), (30, 30))
LONG: Spans = ((1, 700), (3, 401))
STARTS: Spans = ((3, 3), (3, 4), (3, 18), (3, 19), (3, 20))
"""Slices that begin at 0, 1, 15, 16 and 17, for blocks of 16 (H41)."""

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Greatest absolute error of an output, whose values are averages of standard normal ones, by the query's dtype.

Float32 leaves room for sums in another order; the 16-bit ones are a few roundings of a number between 1 and 4. Only
the output's rounding counts: a 16-bit cache is what the expected answer is computed from too.
"""


@dataclass(frozen=True)
class Case:
    """`spans` are (queries, keys) of each sequence, `heads` are (query, KV); `order` is the cache's memory order."""

    name: str
    spans: Spans
    heads: tuple[int, int] = (4, 1)
    dim: int = 64
    value_dim: int | None = None
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    order: str = "HND"
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]


@dataclass
class Problem:
    """A case with its numbers: the cache holds what came before, `k` and `v` `[T, HK, D]` are this step's."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    kv: KVView
    batch: AttnBatch
    options: dict[str, Any] = field(default_factory=dict)
    """`sm_scale`, `window`, `softcap` and `sinks`, as `attention_varlen` takes them."""

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output `[T, HQ, Dv]` and lse `[T, HQ]` by the definition in float64, from what such a cache holds."""
        kv = KVView(self.kv.k.double(), self.kv.v.double())
        write_kv(self.k.to(self.kv.k.dtype), self.v.to(self.kv.v.dtype), kv, self.batch.slots)
        lse = torch.empty(self.q.shape[:2], dtype=torch.float64)
        return attention_varlen(self.q.double(), kv, self.batch, lse=lse, **self.options), lse

    def run(self, backend: Any) -> tuple[Tensor, Tensor]:
        """What a backend makes of it: the step's keys written, then output and lse."""
        lse = torch.full(self.q.shape[:2], float("nan"))
        backend.write_kv(self.k, self.v, self.kv, self.batch.slots)
        return backend.attention_varlen(self.q, self.kv, self.batch, lse=lse, **self.options), lse


def build(case: Case, seed: int = 0) -> Problem:
    """The problem of a case; the same one for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = case.heads
    counts, lengths = [count for count, _ in case.spans], [length for _, length in case.spans]
    table, num_blocks = _deal_blocks(lengths, case.page, draw)
    cache_dtype = case.cache_dtype or case.dtype
    kv = KVView(
        _poisoned(num_blocks, case, case.dim, cache_dtype),
        _poisoned(num_blocks, case, case.value_dim or case.dim, cache_dtype),
    )
    slots = []
    for sequence, (count, length) in enumerate(case.spans):
        places = torch.arange(length)
        owned = table[sequence, places // case.page].long() * case.page + places % case.page
        before = owned[: length - count]
        for cache in (kv.k, kv.v):
            drawn = torch.randn(len(before), num_kv_heads, cache.shape[3], generator=draw)
            cache[before // case.page, before % case.page] = drawn.to(cache_dtype)
        slots.append(owned[length - count :])

    def rows(heads: int, dim: int) -> Tensor:
        return torch.randn(sum(counts), heads, dim, generator=draw).to(case.dtype)

    batch = AttnBatch(
        cu_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slots=torch.cat(slots),
        tree_mask=_tree(counts, draw) if case.tree else None,
        max_q=max(counts),
        max_kv=max(lengths),
    )
    options = dict(
        sm_scale=case.dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=torch.randn(num_heads, generator=draw) if case.sinks else None,
    )
    q, k, v = rows(num_heads, case.dim), rows(num_kv_heads, case.dim), rows(num_kv_heads, kv.v.shape[3])
    return Problem(case, q, k, v, kv, batch, options)


def _deal_blocks(lengths: list[int], page: int, draw: torch.Generator) -> tuple[Tensor, int]:
    """A shuffled block table whose surplus entries name the pool's last block, no one's; and the pool's size."""
    needed = [-(-length // page) for length in lengths]
    num_blocks = sum(needed) + 3
    free = iter((torch.randperm(num_blocks - 2, generator=draw) + 1).tolist())
    table = torch.full((len(lengths), max(needed) + 1), num_blocks - 1, dtype=torch.int32)
    for sequence, count in enumerate(needed):
        for index in range(count):
            table[sequence, index] = next(free)
    return table, num_blocks


def _poisoned(num_blocks: int, case: Case, dim: int, dtype: torch.dtype) -> Tensor:
    """A cache `[block, slot, head, dim]` of NaN in the case's memory order."""
    if case.order == "HND":
        return torch.full((num_blocks, case.heads[1], case.page, dim), float("nan"), dtype=dtype).transpose(1, 2)
    return torch.full((num_blocks, case.page, case.heads[1], dim), float("nan"), dtype=dtype)


def _tree(counts: list[int], draw: torch.Generator) -> Tensor:
    """Each sequence's queries as a random tree: a query sees itself and its ancestors."""
    words = -(-max(counts) // 32)
    mask = torch.zeros(sum(counts), words, dtype=torch.int32)
    row = 0
    for count in counts:
        seen: list[set[int]] = []
        for query in range(count):
            parent = int(torch.randint(-1, query, (1,), generator=draw)) if query else -1
            seen.append({query} | (seen[parent] if parent >= 0 else set()))
            for bit in seen[query]:
                word = int(mask[row, bit // 32]) & 0xFFFFFFFF | 1 << bit % 32
                mask[row, bit // 32] = word - (1 << 32) if word >= 1 << 31 else word
            row += 1
    return mask


CASES = [
    Case("prefill", PREFILL),
    Case("prefill-window", PREFILL, window=8),
    Case("prefill-many-heads", PREFILL, heads=(14, 2)),
    Case("chunk", CHUNK, heads=(14, 2)),
    Case("chunk-window", CHUNK, window=20, page=4),
    Case("chunk-softcap", CHUNK, softcap=3.0),
    Case("decode", DECODE),
    Case("decode-large-heads", DECODE, dim=256),
    Case("decode-window", DECODE, window=33),
    Case("decode-window-below-block", DECODE, window=3),
    Case("decode-window-1", DECODE, window=1),
    Case("decode-softcap", DECODE, softcap=2.0),
    Case("decode-sinks", DECODE, sinks=True),
    Case("decode-sinks-window-softcap", DECODE, heads=(8, 8), window=7, softcap=4.0, sinks=True),
    Case("decode-long", LONG, heads=(14, 2)),
    Case("decode-long-window", LONG, window=300, sinks=True),
    Case("verify", VERIFY),
    Case("verify-window", VERIFY, window=5, heads=(8, 8)),
    Case("verify-tree", VERIFY, tree=True, heads=(14, 2)),
    Case("verify-tree-wide", ((40, 60), (33, 33)), tree=True),
    Case("mixed", MIXED, heads=(14, 2)),
    Case("mixed-window", MIXED, window=11),
    Case("mixed-sinks", MIXED, sinks=True, heads=(12, 2)),
    Case("mixed-block-1", MIXED, page=1),
    Case("mixed-block-4", MIXED, page=4, window=6),
    Case("mixed-block-5", MIXED, page=5, heads=(8, 8)),
    Case("mixed-block-64", MIXED, page=64),
    Case("value-width", MIXED, value_dim=32),
]
ORDERS = [replace(case, name=f"{case.name}-NHD", order="NHD") for case in CASES if case.name in ("mixed", "decode")]
HALVES = [
    replace(case, name=f"{case.name}-{str(dtype).removeprefix('torch.')}", dtype=dtype)
    for case in CASES
    if case.name in ("mixed", "decode-long-window", "prefill-window", "decode-sinks-window-softcap")
    for dtype in (torch.float16, torch.bfloat16)
]
MIXED_TYPES = [Case("bfloat16-cache", MIXED, cache_dtype=torch.bfloat16)]
INDEXING = [
    Case(f"starts-{heads[0]}-{heads[1]}-dim{dim}", STARTS, heads=heads, dim=dim)
    for heads in ((12, 2), (96, 6), (8, 8))
    for dim in (64, 80, 96, 128)
]
"""Head sizes that are no power of two, groups of any size, and slices that begin anywhere in a block (H41)."""

ALL = CASES + ORDERS + HALVES + MIXED_TYPES + INDEXING
