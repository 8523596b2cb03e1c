"""Triton's kernels compiled for GPUs that are not here, by the very calls that would launch them.

`test_triton.py` runs this file in a process of its own: the stand-in driver is for a whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from swapserve_kernels import AttnBatch
from swapserve_kernels.triton_backend import TritonBackend

from .stand_in import Build, count, stand_in

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
MAX_SPILLS = 16
"""Stores to local memory. The assembler spills a few registers by itself where one more program fits for it."""


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[int, TritonBackend, list[Build]]]:
    backend, builds = stand_in(request.param)
    yield request.param, backend, builds
    mock.patch.stopall()


def launch(
    backend: TritonBackend, *, heads: tuple[int, int] = (32, 8), dim: int = 128, dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None, max_q: int = 1, num_seqs: int = 8, max_kv: int = 100, page: int = 16,
    tree: bool = False, sinks: bool = False, **options: Any,
) -> None:  # fmt: skip
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    num_tokens = num_seqs * max_q
    batch = AttnBatch(
        cu_q=empty(num_seqs + 1),
        kv_len=empty(num_seqs),
        block_table=empty(num_seqs, -(-max_kv // page)),
        slots=empty(num_tokens, dtype=torch.int64),
        tree_mask=empty(num_tokens, -(-max_q // 32)) if tree else None,
        max_q=max_q,
        max_kv=max_kv,
    )
    cache = backend.allocate(1000, page, heads[1], dim, cache_dtype or dtype, "meta")
    # As a model hands them over: [heads, tokens, dim] seen as [tokens, heads, dim].
    q, k = (empty(count, num_tokens, dim, dtype=dtype).transpose(0, 1) for count in heads)
    backend.write_kv(k, k, cache, batch.slots)
    if sinks:
        options["sinks"] = empty(heads[0], dtype=torch.float32)
    backend.attention_varlen(q, cache, batch, sm_scale=0.1, **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "decode": dict(),
    "decode-split": dict(max_kv=5000, page=64),
    "decode-all-options": dict(heads=(14, 2), dim=80, window=100, softcap=30.0, sinks=True),
    "verify-tree": dict(max_q=8, dim=64, tree=True, window=100),
    "prefill": dict(max_q=512, max_kv=512),
    "prefill-256": dict(heads=(4, 1), dim=256, max_q=512, max_kv=512, page=64, window=100),
    "prefill-float32": dict(heads=(4, 1), dim=64, dtype=torch.float32, max_q=512, max_kv=512),
    "mixed-types": dict(dtype=torch.float32, cache_dtype=torch.float16),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_launched_compiles_and_fits(made: tuple[int, TritonBackend, list[Build]], variant: str) -> None:
    capability, backend, builds = made
    launch(backend, **VARIANTS[variant])
    kernels = {build.kernel: build for build in builds}
    assert set(kernels) == {"write_kernel", "attention_kernel"} | ({"merge_kernel"} if "split" in variant else set())
    for build in builds:
        assert build.shared_bytes <= SHARED_BYTES[capability]
        assert count("STL", build.code()) <= MAX_SPILLS
    if variant == "prefill" and capability == 90:
        assert count("HGMMA", kernels["attention_kernel"].code()), "prompts must use the tensor cores' wide products"


def test_a_prepared_model_compiles_nothing_more(made: tuple[int, TritonBackend, list[Build]]) -> None:
    """Decodes, drafts, prompts, one or many sequences, short and long: all of it is launched by `prepare`."""
    _, backend, builds = made
    backend.prepare(8, 2, 64, torch.bfloat16)
    prepared = len(builds)
    assert prepared > 4
    for page in (16, 64):
        for max_q in (1, 3, 7, 16, 33, 500):
            for num_seqs, max_kv in ((1, 500), (5, 5000), (16, 501)):
                launch(backend, heads=(8, 2), dim=64, max_q=max_q, num_seqs=num_seqs, max_kv=max_kv, page=page)
    assert [build.kernel for build in builds[prepared:]] == []
