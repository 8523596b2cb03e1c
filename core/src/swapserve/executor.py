"""Runs a transformers model on packed batches: the seam between policies, which count, and tensors.

All slices of a step are laid end to end in one row, `input_ids [1, T]`, with no padding. Which keys a token may
see is in its request's block table and length, so prompts, pieces of prompts, single tokens and drafts to
verify are one forward. Only the rows that the sampler needs go through the language-model head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swapserve.attention import PooledAttention
from swapserve.batch import Batch, Verdict
from swapserve.model import LoadedModel
from swapserve.request import Request
from swapserve.sampler import Sampler, plan_rows
from swapserve_kernels import AttnBatch, get_backend


class TorchExecutor:
    """Implements `swapserve.batch.Executor` on a loaded model, with a KV pool of its own.

    The pool has `num_blocks` blocks of `block_size` tokens in every layer. `backend` names the attention kernels;
    None takes the model's.
    """

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, *, backend: str | None = None) -> None:
        self.model = model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.sampler = Sampler(model.vocab_size, model.device)
        self._kernels = model.kernels if backend is None else get_backend(backend, model.device)
        allocate, dtype, device = self._kernels.allocate, model.dtype, model.device
        self._pool = [
            allocate(num_blocks, block_size, facts.num_kv_heads, facts.head_dim, dtype, device)
            for facts in model.layers
        ]

    def execute(self, batch: Batch) -> Sequence[Verdict]:
        """One verdict a work, in order. The KV of every position in the batch is stored when it returns."""
        if not batch.works:
            return []
        if batch.block_size != self.block_size:
            raise ValueError(
                f"the batch's block size is {batch.block_size} and the KV pool's {self.block_size}: "
                "make the executor with the KV manager's block size"
            )
        rows = plan_rows(batch)
        with torch.inference_mode():
            input_ids, positions, attn_batch = self._pack(batch)
            step = PooledAttention(self._kernels, self._pool, attn_batch)
            hidden = self.model.hidden(input_ids, positions, step)
            if len(rows) < len(hidden):
                hidden = hidden.index_select(0, torch.tensor(rows.index, dtype=torch.int64, device=hidden.device))

            def logits(begin: int, end: int) -> Tensor:
                return self.model.logits(hidden[begin:end])

            return self.sampler.judge(batch, rows, logits)

    def forget(self, request: Request) -> None:
        """The request is finished or aborted: drop what is kept for it. Harmless for one never seen."""
        self.sampler.forget(request)

    def _pack(self, batch: Batch) -> tuple[Tensor, Tensor, AttnBatch]:
        """Token ids and positions `[T]`, and what the kernels need to know of the batch."""
        works, size = batch.works, self.block_size
        starts = np.fromiter((work.slice.start for work in works), np.int64, len(works))
        counts = np.fromiter((work.slice.count for work in works), np.int64, len(works))
        ends = starts + counts
        offsets = np.zeros(len(works) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        total = int(offsets[-1])
        input_ids = np.fromiter(chain.from_iterable(work.token_ids for work in works), np.int64, total)
        positions = np.arange(total) + np.repeat(starts - offsets[:-1], counts)
        table = _block_table([work.table for work in works], -(-ends // size))
        owner = np.repeat(np.arange(len(works)), counts)
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        return (
            self._tensor(input_ids),
            self._tensor(positions),
            AttnBatch(
                cu_q=self._tensor(offsets.astype(np.int32)),
                kv_len=self._tensor(ends.astype(np.int32)),
                block_table=self._tensor(table),
                slots=self._tensor(slots),
                tree_mask=None,
                max_q=int(counts.max()),
                max_kv=int(ends.max()),
            ),
        )

    def _tensor(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)


def _block_table(tables: Sequence[Sequence[int]], needed: NDArray[np.int64]) -> NDArray[np.int32]:
    """The requests' blocks as one array `[S, most needed]`, padded with 0: entries past a length are never read."""
    padded = np.zeros((len(tables), int(needed.max())), np.int32)
    used = np.arange(padded.shape[1]) < needed[:, None]
    padded[used] = np.fromiter(
        chain.from_iterable(table[:count] for table, count in zip(tables, needed.tolist(), strict=True)),
        np.int32,
        int(needed.sum()),
    )
    return padded
