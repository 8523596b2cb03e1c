"""Attention over a paged KV cache: one contract, a plain definition, and fast backends for CPUs and GPUs."""

from swapserve_kernels.backends import NAMES, Backend, BackendUnavailable, get_backend
from swapserve_kernels.types import AttnBatch, KVView

__version__ = "0.1.0"

__all__ = ["NAMES", "AttnBatch", "Backend", "BackendUnavailable", "KVView", "get_backend"]
