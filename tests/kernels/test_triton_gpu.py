"""The Triton backend on a GPU: the cases that the interpreter computes, compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swapserve_kernels import AttnBatch, KVView, get_backend
from swapserve_kernels.triton_backend import TritonBackend

from .cases import ALL, Case, Problem, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the interpreter runs these cases")


def to_gpu(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KVView, AttnBatch, dict[str, object]]:
    batch = AttnBatch(**{name: on_gpu(value) for name, value in vars(problem.batch).items()})
    # `.to` keeps the memory order, which is part of the case.
    kv = KVView(problem.kv.k.cuda(), problem.kv.v.cuda())
    options = {name: on_gpu(value) for name, value in problem.options.items()}
    return problem.q.cuda(), problem.k.cuda(), problem.v.cuda(), kv, batch, options


def on_gpu(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_attention_is_the_definitions(case: Case, num_splits: int | None) -> None:
    problem = build(case)
    expected_out, expected_lse = problem.expected()
    q, k, v, kv, batch, options = to_gpu(problem)
    backend = TritonBackend("cuda", num_splits=num_splits)
    lse = torch.full(q.shape[:2], float("nan"), device="cuda")
    backend.write_kv(k, v, kv, batch.slots)
    out = backend.attention_varlen(q, kv, batch, lse=lse, **options)
    assert (out.cpu().double() - expected_out).abs().max() <= case.tolerance
    assert (lse.cpu().double() - expected_lse).abs().max() <= (5e-6 if case.dtype == torch.float32 else 1e-3)


def test_a_pool_of_more_elements_than_int32_counts() -> None:
    problem = build(Case("large", ((3, 40),), heads=(2, 1), dtype=torch.float16))
    num_blocks = (1 << 31) // (2 * 16 * 64) + 9
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("less than 8 GiB of GPU memory are free")
    expected_out, _ = problem.expected()
    q, k, v, kv, batch, options = to_gpu(problem)
    pool = torch.empty(num_blocks, 2, 16, 1, 64, dtype=torch.float16, device="cuda")
    shift = num_blocks - kv.k.shape[0]
    pool[shift:, 0], pool[shift:, 1] = kv.k, kv.v
    batch = replace(batch, block_table=batch.block_table + shift, slots=batch.slots + 16 * shift)
    backend = TritonBackend("cuda")
    backend.write_kv(k, v, KVView(pool[:, 0], pool[:, 1]), batch.slots)
    out = backend.attention_varlen(q, KVView(pool[:, 0], pool[:, 1]), batch, **options)
    assert (out.cpu().double() - expected_out).abs().max() <= problem.case.tolerance


@pytest.mark.parametrize("num_splits", [1, 4])
def test_prepared_kernels_are_the_ones_that_serve(num_splits: int) -> None:
    """What `prepare` compiles covers decodes, drafts and prompts of a plain model: none compiles later."""
    backend = get_backend("triton", "cuda")
    assert isinstance(backend, TritonBackend)
    backend.prepare(8, 2, 64, torch.bfloat16)
    kernels = (backend._attention, backend._write, backend._merge)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    for spans in (((1, 70), (1, 3)), ((4, 20), (1, 9)), ((90, 90), (1, 300))):
        problem = build(Case("served", spans, heads=(8, 2), dtype=torch.bfloat16, order="NHD"))
        q, k, v, kv, batch, options = to_gpu(problem)
        served = TritonBackend("cuda", num_splits=num_splits)
        served.write_kv(k, v, kv, batch.slots)
        served.attention_varlen(q, kv, batch, **options)
    assert [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels] == before
