"""Backends by name, and the one that suits a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swapserve_kernels.types import AttnBatch, KVView

NAMES = ("reference", "cpu", "triton")


class Backend(Protocol):
    """What every backend offers; `reference.py` says what each call means."""

    name: str

    def allocate(
        self,
        num_blocks: int,
        page: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
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
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor: ...

    def merge_states(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None) -> None: ...


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot run here; the message says what it needs."""


def get_backend(name: str | None, device: torch.device | str) -> Backend:
    """The backend called `name`; None or "auto" is `triton` on a GPU and `cpu` on a CPU.

    Raises `ValueError` for an unknown name and `BackendUnavailable` where it cannot run; nothing else is taken instead.
    """
    kind = torch.device(device).type
    if name is None or name == "auto":
        name = "triton" if kind == "cuda" else "cpu" if kind == "cpu" else "reference"
    if name == "reference":
        from swapserve_kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        if kind != "cpu":
            raise BackendUnavailable(f"attention backend 'cpu' runs on a CPU, and the device is {device}")
        from swapserve_kernels.cpu import CpuBackend

        return CpuBackend()
    if name == "triton":
        from swapserve_kernels.triton_backend import TritonBackend

        return TritonBackend(device)
    raise ValueError(f"there is no attention backend {name!r}; there are: {', '.join(NAMES)}")
