"""The CPU backend: numba over pages for few queries, blocks of products in torch for many.

Caches lie as `[block, HK, page, D]`, so that a head's keys of one block are side by side.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swapserve_kernels import reference
from swapserve_kernels.cpu_tasks import MANY_QUERIES, Step
from swapserve_kernels.cpu_torch import attend_sequences
from swapserve_kernels.types import AttnBatch, KVView

try:
    import numba

    from swapserve_kernels import cpu_numba
except ImportError:  # the extra `cpu` is not installed: torch alone does all of it
    numba = None
    cpu_numba = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

BITS = {torch.bfloat16: (torch.int16, np.uint16), torch.float16: (torch.int16, np.int16)}
"""How numba is shown numbers that it does not know: torch's type to see them as, and numpy's to tell them apart."""
NOT_WANTED = np.empty((0, 0), np.float32)
NO_SINKS = np.empty(0, np.float32)
_lock = threading.Lock()
"""One parallel region at a time: numba's simplest threading layer ends the process when two threads enter it."""


class CpuBackend:
    """`engine` is "numba" or "torch": what slices of few queries run on. Masks that are not causal are torch's."""

    name = "cpu"

    def __init__(self, engine: str | None = None) -> None:
        if engine is None:
            engine = "torch" if numba is None else "numba"
            if numba is None:
                logger.warning(
                    "numba is not installed, so decoding runs in torch, slower: install swapserve-kernels[cpu]"
                )
        if engine not in ("numba", "torch"):
            raise ValueError(f"there is no CPU engine {engine!r}; there are: numba, torch")
        if engine == "numba" and numba is None:
            raise ValueError("the CPU engine 'numba' needs numba: install swapserve-kernels[cpu]")
        self.engine = engine
        self._step: Step | None = None
        self._scratch: dict[int, tuple[Any, Any, Any]] = {}

    def allocate(
        self,
        num_blocks: int,
        page: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVView:
        """An empty cache of one layer: a head's keys of a block lie side by side in memory."""
        shape = (num_blocks, num_kv_heads, page, head_dim)
        k, v = (_untouched_zeros(shape, dtype).transpose(1, 2) for _ in range(2))
        return KVView(k, v)

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile, or load from numba's cache, so that no request waits for it."""
        cache = self.allocate(4, 16, num_kv_heads, head_dim, dtype, "cpu")
        for count in (1, MANY_QUERIES):
            batch = AttnBatch(
                cu_q=torch.tensor([0, count], dtype=torch.int32),
                kv_len=torch.tensor([count], dtype=torch.int32),
                block_table=torch.arange(4, dtype=torch.int32)[None],
                slots=torch.arange(count),
                tree_mask=None,
                max_q=count,
                max_kv=count,
            )
            rows = torch.zeros(1, num_heads + 2 * num_kv_heads, count, head_dim, dtype=dtype)[0].transpose(0, 1)
            end_of_keys = num_heads + num_kv_heads
            q, k, v = rows[:, :num_heads], rows[:, num_heads:end_of_keys], rows[:, end_of_keys:]
            self.write_kv(k, v, cache, batch.slots)
            self.attention_varlen(q, cache, batch, sm_scale=1.0)

    def write_kv(self, k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
        """Store `[T, HK, D]` keys and values at `slots`, int64 `[T]`; -1 stores nothing."""
        if self.engine == "numba" and kv.k_scale is None and _is_known(kv):
            rows = [_as_numpy(new.to(kv.k.dtype).contiguous()) for new in (k, v)]
            cpu_numba.write_pages(*rows, _pages(kv.k), _pages(kv.v), slots.numpy())
        else:
            reference.write_kv(k, v, kv, slots)

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
        num_kv_heads = kv.k.shape[2]
        if q.shape[1] % num_kv_heads:
            raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads evenly")
        if kv.k_scale is not None or kv.v_scale is not None:
            raise ValueError("8-bit caches are not supported by this backend: use a 16-bit or 32-bit one")
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[3])
        step = self._step
        if step is None or step.batch is not batch:
            step = self._step = Step(batch)
        over_pages = (
            self.engine == "numba" and causal and batch.tree_mask is None and _is_known(kv) and q.dtype != torch.float64
        )
        if over_pages and step.few:
            self._attend_pages(step, q, kv, sm_scale, window, softcap, sinks, out, lse)
        products = step.many if over_pages else step.few + step.many
        if products:
            attend_sequences(
                products, step.starts, step.lengths, q, kv, batch, out, lse,
                sm_scale=sm_scale, causal=causal, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        return out

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Join attention over parts of the keys; see `reference.merge_states`."""
        reference.merge_states(outs, lses, out, lse)

    def _attend_pages(
        self,
        step: Step,
        q: Tensor,
        kv: KVView,
        sm_scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Fill `out` and `lse` for the slices of few queries, by way of float32 where they are something else."""
        num_kv_heads, width = kv.k.shape[2], kv.v.shape[3]
        group = q.shape[1] // num_kv_heads
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        tasks = step.tasks(num_kv_heads, group, window, threads)
        made_out = out.numpy() if out.dtype == torch.float32 else out.to(torch.float32).numpy()
        made_lse = NOT_WANTED if lse is None else lse.numpy() if lse.dtype == torch.float32 else lse.float().numpy()
        with _lock:
            numba.set_num_threads(threads)
            cpu_numba.attend_pages(
                tasks.rows, tasks.order, tasks.bounds, q.to(torch.float32).contiguous().numpy(),
                _pages(kv.k), _pages(kv.v), step.table, np.float32(sm_scale), window, np.float32(softcap),
                NO_SINKS if sinks is None else sinks.float().numpy(),
                *self._room(len(tasks.rows), tasks.max_rows, width), made_out, made_lse,
            )  # fmt: skip
        if out.dtype != torch.float32:
            out.copy_(torch.from_numpy(made_out))
        if lse is not None and lse.dtype != torch.float32:
            lse.copy_(torch.from_numpy(made_lse))

    def _room(self, num_tasks: int, num_rows: int, width: int) -> tuple[Any, Any, Any]:
        """Scratch for the outcome of tasks, kept from call to call and grown when it must be."""
        need = num_tasks * num_rows
        made, tops, sums = self._scratch.get(width, (None, None, None))
        if made is None or len(tops) < need:
            made = np.empty(need * width, np.float32)
            tops, sums = np.empty(need, np.float32), np.empty(need, np.float32)
            self._scratch[width] = (made, tops, sums)
        return (
            made[: need * width].reshape(num_tasks, num_rows, width),
            tops[:need].reshape(num_tasks, num_rows),
            sums[:need].reshape(num_tasks, num_rows),
        )


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take neither time nor memory until they are written: numpy's are fresh pages of the system's.

    torch's own are written one by one, which for a cache of 4 GiB takes seconds at every start.
    """
    align = 64
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + align, np.uint8))
    start = -raw.data_ptr() % align
    return raw[start : start + size].view(dtype).view(shape)


def _is_known(kv: KVView) -> bool:
    """Whether numba has a way to read the cache."""
    return kv.k.dtype == kv.v.dtype and (kv.k.dtype == torch.float32 or kv.k.dtype in BITS)


def _as_numpy(tensor: Tensor) -> Any:
    """A tensor as numpy sees it, without a copy; 16-bit floats as their bits."""
    if tensor.dtype not in BITS:
        return tensor.numpy()
    seen, told_apart = BITS[tensor.dtype]
    return tensor.view(seen).numpy().view(told_apart)


def _pages(cache: Tensor) -> Any:
    """A cache as `[block, HK, page, D]`."""
    return _as_numpy(cache.transpose(1, 2))
