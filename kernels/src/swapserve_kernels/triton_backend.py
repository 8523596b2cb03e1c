"""The Triton backend: attention over a paged cache on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swapserve_kernels.backends import BackendUnavailable
from swapserve_kernels.triton_table import (
    MAX_HEAD_DIM,
    Variant,
    architecture,
    choose_splits,
    choose_variant,
    next_power_of_two,
)
from swapserve_kernels.types import AttnBatch, KVView

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 32
"""(token, head) rows a program of the writing and merging kernels takes."""


class TritonBackend:
    """`num_splits` fixes into how many parts the keys are split; None: as many as keep the GPU busy.

    Raises `BackendUnavailable` without a GPU, unless Triton's interpreter is on.
    """

    name = "triton"

    def __init__(self, device: torch.device | str = "cuda", *, num_splits: int | None = None) -> None:
        self.interpreting = _interpreting(torch.device(device))
        # Imported here: importing the package must not import triton, whose import settles whether it interprets.
        from swapserve_kernels import triton_attention, triton_cache, triton_merge

        self._attention: Any = triton_attention.attention_kernel
        self._write: Any = triton_cache.write_kernel
        self._merge: Any = triton_merge.merge_kernel
        self._device = torch.device(device)
        self._num_splits = num_splits
        self._num_processors, self._arch = 1, "interpreter"
        if not self.interpreting:
            properties = torch.cuda.get_device_properties(self._device)
            self._num_processors = properties.multi_processor_count
            self._arch = architecture(properties.major, torch.version.hip is not None)

    def allocate(
        self,
        num_blocks: int,
        page: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVView:
        """An empty cache of one layer, `[block, page, HK, D]` in memory too: a token's heads lie side by side."""
        shape = (num_blocks, page, num_kv_heads, head_dim)
        return KVView(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile what a plain model launches, so that no request waits for it; nothing when interpreting."""
        if self.interpreting:
            return
        for page in (16, 64):  # a tile within a block, or over several: two versions of the kernel
            cache = self.allocate(2, page, num_kv_heads, head_dim, dtype, self._device)
            for num_splits in (1, 2):
                for max_q in (1, 2, 4, 8, 16, 32, 64, 128):
                    TritonBackend(self._device, num_splits=num_splits)._rehearse(cache, num_heads, max_q)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
        """Store `[T, HK, D]` keys and values at `slots`, int64 `[T]`; -1 stores nothing."""
        _check_cache(kv)
        _check_rows("k", k)
        _check_rows("v", v)
        num_tokens, num_kv_heads, key_dim = k.shape
        value_dim = v.shape[2]
        if not num_tokens:
            return
        rows = 256 if self.interpreting else ROWS
        if self.interpreting:  # its own casts to bfloat16 cut off instead of rounding
            k, v = k.to(kv.k.dtype), v.to(kv.v.dtype)
        self._write[(-(-num_tokens * num_kv_heads // rows),)](
            k, v, kv.k, kv.v, slots, num_tokens, kv.page,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3],
            NUM_HEADS=num_kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_D=next_power_of_two(key_dim), BLOCK_DV=next_power_of_two(value_dim), BLOCK_R=rows,
        )  # fmt: skip

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
        """Attention of `q` `[T, HQ, D]` over each sequence's own keys; see `reference.attention_varlen`."""
        _check_cache(kv)
        _check_heads(q, kv)
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, value_dim = kv.v.shape[2:]
        if out is None:
            out = q.new_empty(num_tokens, num_heads, value_dim)
        _check_rows("out", out)
        if lse is not None:
            _check_rows("lse", lse)
        if not num_tokens:
            return out
        group, num_seqs = num_heads // num_kv_heads, batch.kv_len.shape[0]
        variant = choose_variant(self._arch, head_dim, group, batch.max_q, max(q.itemsize, kv.k.itemsize))
        num_tiles = num_tokens // (variant.block_m // group) + num_seqs
        max_keys = min(batch.max_kv, window + batch.max_q) if window else batch.max_kv
        splits = self._num_splits or choose_splits(
            num_tiles, num_kv_heads, max_keys, variant.block_m, self._num_processors
        )
        if splits == 1:
            outs, lses = out[None], lse if lse is None else lse[None]
        else:
            outs = q.new_empty(splits, num_tokens, num_heads, value_dim, dtype=torch.float32)
            lses = q.new_empty(splits, num_tokens, num_heads, dtype=torch.float32)
        self._launch(q, kv, batch, variant, num_tiles, outs, lses, sinks, sm_scale, causal, window, softcap)
        if splits > 1:
            assert lses is not None
            self.merge_states(outs, lses, out, lse)
        return out

    def _launch(
        self,
        q: Tensor,
        kv: KVView,
        batch: AttnBatch,
        variant: Variant,
        num_tiles: int,
        outs: Tensor,
        lses: Tensor | None,
        sinks: Tensor | None,
        sm_scale: float,
        causal: bool,
        window: int,
        softcap: float,
    ) -> None:
        """Fill `outs` `[splits, T, HQ, Dv]` and `lses` `[splits, T, HQ]`, each split's own."""
        head_dim, (num_kv_heads, value_dim) = q.shape[2], kv.v.shape[2:]
        group, tree, table = q.shape[1] // num_kv_heads, batch.tree_mask, batch.block_table
        dtypes = {q.dtype, kv.k.dtype, kv.v.dtype}
        one_page = kv.page % variant.block_n == 0 or (table.shape[1] == 1 and kv.page > variant.block_n)
        self._attention[(num_tiles, num_kv_heads, outs.shape[0])](
            q, kv.k, kv.v, outs, lses, None if sinks is None else sinks.float(), tree,
            batch.cu_q, batch.kv_len, table, table.shape[0], kv.page, window, float(sm_scale), float(softcap),
            q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3], *outs.stride()[:3],
            *((0, 0) if lses is None else lses.stride()[:2]), table.stride(0), 0 if tree is None else tree.stride(0),
            HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            BLOCK_D=max(16, next_power_of_two(head_dim)), BLOCK_DV=max(16, next_power_of_two(value_dim)),
            GROUP=group, BLOCK_M=variant.block_m, BLOCK_N=variant.block_n,
            CAUSAL=causal, WINDOWED=window > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None, TREE=tree is not None,
            LSE=lses is not None, ONE_PAGE=one_page,
            UPCAST=len(dtypes) > 1 or (self.interpreting and torch.bfloat16 in dtypes),
            num_warps=variant.num_warps, num_stages=variant.num_stages,
        )  # fmt: skip

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Join attention over parts of the keys; see `reference.merge_states`."""
        for name, tensor in (("outs", outs), ("lses", lses), ("out", out), ("lse", lse)):
            if tensor is not None:
                _check_rows(name, tensor)
        num_parts, num_tokens, num_heads, dim = outs.shape
        if not num_tokens:
            return
        rows = 256 if self.interpreting else max(1, 4096 // next_power_of_two(dim))
        self._merge[(-(-num_tokens * num_heads // rows),)](
            outs, lses, out, lse, num_parts, num_tokens * num_heads, *outs.stride()[:3], *lses.stride()[:2],
            out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
            NUM_HEADS=num_heads, DIM=dim, BLOCK_D=next_power_of_two(dim), BLOCK_R=rows, LSE=lse is not None,
        )  # fmt: skip

    def _rehearse(self, cache: KVView, num_heads: int, max_q: int) -> None:
        """One small launch of everything, for slices of up to `max_q` queries."""
        _, _, num_kv_heads, head_dim = cache.k.shape
        number = torch.arange(2, dtype=torch.int32, device=self._device)
        batch = AttnBatch(
            cu_q=number, kv_len=number[1:], block_table=number[None], slots=number[:1].long(),
            tree_mask=None, max_q=max_q, max_kv=1,
        )  # fmt: skip
        q = torch.zeros(1, num_heads, head_dim, dtype=cache.k.dtype, device=self._device)
        self.write_kv(q[:, :num_kv_heads], q[:, :num_kv_heads], cache, batch.slots)
        self.attention_varlen(q, cache, batch, sm_scale=1.0)


def _interpreting(device: torch.device) -> bool:
    """Whether Triton interprets in this process; raises `BackendUnavailable` where it can neither do so nor compile."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        raise BackendUnavailable("attention backend 'triton' needs Triton: install swapserve-kernels[triton]") from None
    # Triton's own library is settled when it is first imported; kernels, later, must be of the same kind.
    interpreting = not isinstance(tl.sum, triton.JITFunction)
    if interpreting != bool(triton.knobs.runtime.interpret):
        raise BackendUnavailable(
            "attention backend 'triton' finds TRITON_INTERPRET changed after Triton's import: set it earlier"
        )
    if not interpreting and (device.type != "cuda" or not torch.cuda.is_available()):
        raise BackendUnavailable(
            f"attention backend 'triton' needs a GPU, and the device is {device}: take another backend, "
            "or set TRITON_INTERPRET=1 before Python starts to test it slowly on a CPU"
        )
    return interpreting


def _check_cache(kv: KVView) -> None:
    if kv.k_scale is not None or kv.v_scale is not None:
        raise ValueError("8-bit caches are not supported by this backend: use a 16-bit or 32-bit one")
    for name, cache in (("k", kv.k), ("v", kv.v)):
        if cache.dtype not in DTYPES:
            raise ValueError(f"the {name} cache is {cache.dtype}, and this backend has: {', '.join(map(str, DTYPES))}")
        _check_rows(f"{name} cache", cache)


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, and its stride is {tensor.stride(-1)}")


def _check_heads(q: Tensor, kv: KVView) -> None:
    num_heads, num_kv_heads, head_dim, value_dim = q.shape[1], kv.k.shape[2], kv.k.shape[3], kv.v.shape[3]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if q.shape[2] != head_dim:
        raise ValueError(f"queries have heads of {q.shape[2]}, and the cache's keys have {head_dim}")
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {max(head_dim, value_dim)} are more than this backend takes: {MAX_HEAD_DIM}")
    if q.dtype not in DTYPES:
        raise ValueError(f"queries are {q.dtype}, and this backend has: {', '.join(map(str, DTYPES))}")
    _check_rows("q", q)
