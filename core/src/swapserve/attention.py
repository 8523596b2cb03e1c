"""One attention function, registered with transformers, through which every model reads and writes the KV pool.

The packed batch, the pool and the kernels travel through the forward's keyword arguments as one object with an
`attend` method, so that nothing is kept in a global and two executors never meet. No mask function is
registered under our name on purpose: transformers then builds no mask at all, where it would otherwise make a
dense [T, T] one each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from swapserve.model_errors import UnsupportedModel
from swapserve_kernels import AttnBatch, KVView

ATTENTION_NAME = "swapserve"


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks of the kernel besides its tensors; a window of 0 and a soft cap of 0 mean none."""

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class AttentionStep(Protocol):
    """One forward's attention: the KV pool and the batch, or a probe that looks at what a model asks for."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """query [T, HQ, D], key and value [T, HK, D], all after rotary; returns [T, HQ, D]."""


class Kernels(Protocol):
    """The part of a `swapserve_kernels` backend that is used here."""

    name: str

    def allocate(
        self, num_blocks: int, page: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVView: ...

    def prepare(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None: ...

    def write_kv(self, k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None: ...

    def attention_varlen(
        self,
        q: Tensor,
        kv: KVView,
        batch: AttnBatch,
        *,
        sm_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class PooledAttention:
    """Stores the new keys and values of a step, then attends over each request's own blocks."""

    def __init__(self, kernels: Kernels, pool: Sequence[KVView], batch: AttnBatch) -> None:
        self._kernels = kernels
        self._pool = pool
        self._batch = batch

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        cache = self._pool[call.layer]
        self._kernels.write_kv(key, value, cache, self._batch.slots)
        return self._kernels.attention_varlen(
            query,
            cache,
            self._batch,
            sm_scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )


def swapserve_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    swapserve_step: AttentionStep | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls: tensors are [1, H, T, D]; the answer is [1, T, HQ, D]."""
    if swapserve_step is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own, which is not supported")
    call = AttentionCall(
        layer=getattr(module, "layer_idx", -1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    attended = swapserve_step.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, swapserve_attention)
