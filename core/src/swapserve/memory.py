"""How large the KV pool is: what memory is left once the weights are loaded and the largest step has run.

On a GPU the share that may be used is a setting, and what a step needs is measured by running the largest one. On a
CPU memory is shared with everything else on the machine, so the pool takes at most half of what is free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from swapserve.batch import Batch, Slice, Work
from swapserve.executor import TorchExecutor
from swapserve.model import LoadedModel
from swapserve.model_errors import ModelError
from swapserve.params import SamplingParams
from swapserve.request import Request

CPU_MOST_BYTES = 4 << 30
"""The most that a pool on a CPU takes unasked."""
CPU_SHARE = 0.5
"""The share of free memory that a pool on a CPU takes at most unasked; steps need some of the rest."""


@dataclass(frozen=True)
class PoolSize:
    """A KV pool's size in blocks, and what it is good for."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def num_longest_requests(self) -> float:
        """How many requests of the greatest length it holds at once."""
        return self.num_tokens / self.max_model_len

    @property
    def warning(self) -> str | None:
        """A sentence for a pool that cannot hold one request of the greatest length; such requests are refused."""
        if self.num_tokens >= self.max_model_len:
            return None
        needed = self.max_model_len * self.bytes_per_token
        return (
            f"the KV cache holds {self.num_tokens} tokens, less than one request of the greatest length, "
            f"{self.max_model_len} tokens: longer requests will be refused. Give --kv-cache-memory-bytes "
            f"{needed} or more, or a smaller --max-model-len."
        )


def size_pool(
    model: LoadedModel,
    block_size: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
) -> PoolSize:
    """The KV pool there is memory for; never more than `max_num_seqs` requests of the greatest length need.

    `kv_cache_memory_bytes` sets its memory outright. Raises `ModelError` when not one block fits.
    """
    if kv_cache_memory_bytes is not None:
        memory, source = kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    elif model.device.type == "cuda":
        memory = _gpu_memory(model, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization)
        source = f"--gpu-memory-utilization {gpu_memory_utilization} leaves {max(0, memory)} bytes, which"
    else:
        memory, source = min(CPU_MOST_BYTES, int(free_cpu_memory() * CPU_SHARE)), "half of the free memory"
    num_blocks = memory // (block_size * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise ModelError(
            f"{source} holds not one KV block of {block_size} tokens ({block_size * model.kv_bytes_per_token} bytes): "
            "give more memory, or choose a smaller model"
        )
    most = max_num_seqs * -(-model.max_model_len // block_size)
    return PoolSize(min(num_blocks, most), block_size, model.kv_bytes_per_token, model.max_model_len)


def run_largest_step(model: LoadedModel, max_num_seqs: int, max_num_batched_tokens: int) -> TorchExecutor:
    """Run a step of the most tokens and the most sampling requests there can be, on a pool of just that size."""
    num_requests = min(max_num_seqs, max_num_batched_tokens)
    count = min(max_num_batched_tokens // num_requests, model.max_model_len)
    executor = TorchExecutor(model, num_requests, count)
    greedy = SamplingParams(temperature=0.0)
    works = []
    for number in range(num_requests):
        request = Request(f"largest-step-{number}", (0,) * count, greedy, max_len=count + 1)
        works.append(Work(Slice(request, 0, count), request.tokens, [number]))
    executor.execute(Batch(works, count))
    return executor


def free_cpu_memory() -> int:
    """Bytes that can be had without swapping, within this process's control group where it has a limit."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = [int(lines["MemAvailable"].split()[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free.append(int(most) - int(used.read_text()))
    return max(0, min(free))


def _gpu_memory(model: LoadedModel, max_num_seqs: int, max_num_batched_tokens: int, share: float) -> int:
    """Bytes of the GPU's memory within `share` that the weights and the largest step leave."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    executor = run_largest_step(model, max_num_seqs, max_num_batched_tokens)
    torch.cuda.synchronize(model.device)
    pool = executor.num_blocks * executor.block_size * model.kv_bytes_per_token
    step = torch.cuda.max_memory_allocated(model.device) - before - pool
    del executor
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * share) - (total - free) - step
