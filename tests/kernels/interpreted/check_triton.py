"""Triton's kernels in Triton's interpreter, against the definition in float64.

`test_triton.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports triton.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from swapserve_kernels import KVView, get_backend, reference
from swapserve_kernels.triton_backend import TritonBackend

from ..cases import ALL, CASES, Case, Problem, build

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Float32 within a few sums' roundings; the 16-bit ones are the output's rounding, and bfloat16's here cuts off."""
SPLIT = [case for case in CASES if case.heads != (8, 8)]


@pytest.fixture(scope="module")
def triton_backend() -> TritonBackend:
    backend = get_backend("triton", "cpu")
    assert isinstance(backend, TritonBackend) and backend.interpreting
    return backend


def check(problem: Problem, backend: TritonBackend) -> None:
    out, lse = problem.run(backend)
    expected_out, expected_lse = problem.expected()
    assert (out.double() - expected_out).abs().max() <= TOLERANCE[problem.case.dtype]
    assert (lse.double() - expected_lse).abs().max() <= 2e-6


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_attention_is_the_definitions(triton_backend: TritonBackend, case: Case) -> None:
    check(build(case), triton_backend)


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_splitting_the_keys_changes_nothing(case: Case) -> None:
    """Three splits: some of them empty, a sink in one only, parts that a row sees nothing of."""
    check(build(case), TritonBackend("cpu", num_splits=3))


@pytest.mark.parametrize("count", [1, 4])
def test_a_contiguous_cache_is_one_block_a_sequence(count: int) -> None:
    """One block of 100 slots, which tiles of 64 keys do not divide: the last tile reaches past the block."""
    problem = build(Case("contiguous", ((count, 100), (count, 37), (1, 1)), heads=(4, 2), page=100, order="NHD"))
    problem.batch = replace(problem.batch, block_table=problem.batch.block_table[:, :1])
    check(problem, TritonBackend("cpu", num_splits=1))


def test_every_query_sees_every_key_when_not_causal(triton_backend: TritonBackend) -> None:
    problem = build(Case("all", ((5, 20), (17, 17)), heads=(4, 2)))
    problem.options |= dict(causal=False)
    check(problem, triton_backend)


def test_a_tree_is_judged_by_its_bits_and_the_window_together(triton_backend: TritonBackend) -> None:
    check(build(Case("tree-window", ((6, 30), (9, 9)), tree=True, window=7)), triton_backend)


def test_a_tree_may_look_ahead(triton_backend: TritonBackend) -> None:
    """All bits set: queries of the first tile see those of the second, past where a causal tile would stop."""
    problem = build(Case("ahead", ((150, 160),), heads=(4, 2), tree=True))
    assert problem.batch.tree_mask is not None
    problem.batch.tree_mask.fill_(-1)
    check(problem, triton_backend)


def test_blocks_behind_the_window_may_be_given_away(triton_backend: TritonBackend) -> None:
    """They hold NaN by then, and the tile of the earliest key that is still seen begins among them."""
    problem = build(Case("freed", ((3, 110),), heads=(4, 2), window=60))
    expected_out, expected_lse = problem.expected()
    num_freed = (110 - 3 - 60 + 1) // 16
    assert 0 < num_freed < 64 // 16
    problem.batch.block_table[0, :num_freed] = 0  # the pool's first block, which is no one's
    out, lse = problem.run(triton_backend)
    assert (out.double() - expected_out).abs().max() <= 2e-6
    assert (lse.double() - expected_lse).abs().max() <= 2e-6


def test_rows_that_see_nothing_are_zero_and_not_nan(triton_backend: TritonBackend) -> None:
    """A tree whose bits are all off, with no context: the softmax is over nothing."""
    problem = build(Case("nothing", ((4, 4),), heads=(4, 2), tree=True))
    assert problem.batch.tree_mask is not None
    problem.batch.tree_mask.zero_()
    for backend in (triton_backend, TritonBackend("cpu", num_splits=2)):
        out, lse = problem.run(backend)
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


def test_queries_of_any_stride_fill_the_out_that_is_given(triton_backend: TritonBackend) -> None:
    """Queries `[HQ, T, D]` seen as `[T, HQ, D]`, keys and values cut out of one fused tensor, and a strided `out`."""
    problem = build(Case("strides", ((3, 20), (1, 9)), heads=(4, 2)))
    problem.q = problem.q.transpose(0, 1).contiguous().transpose(0, 1)
    problem.k, problem.v = torch.stack([problem.k, problem.v]).transpose(0, 1).contiguous().unbind(1)
    room = torch.full((4, 6, 64), float("nan"))
    problem.options |= dict(out=room[:, 1:5])
    out, _ = problem.run(triton_backend)
    assert out.data_ptr() == room[:, 1:5].data_ptr()
    assert (room[:, [0, 5]].isnan()).all()
    del problem.options["out"]
    assert (room[:, 1:5].double() - problem.expected()[0]).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_written_where_the_slots_say_and_nowhere_else(triton_backend: TritonBackend, dtype: torch.dtype) -> None:
    kv, expected = (triton_backend.allocate(5, 4, 3, 80, dtype, "cpu") for _ in range(2))
    k, v = torch.randn(2, 7, 3, 80, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([19, -1, 0, 7, -1, 8, 3])
    triton_backend.write_kv(k, v, kv, slots)
    reference.write_kv(k, v, expected, slots)
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)


def test_more_rows_than_a_program_takes_are_written(triton_backend: TritonBackend) -> None:
    kv, expected = (triton_backend.allocate(40, 5, 2, 64, torch.float32, "cpu") for _ in range(2))
    k, v = torch.randn(2, 190, 2, 64, generator=torch.Generator().manual_seed(0))
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:190]
    triton_backend.write_kv(k, v, kv, slots)
    reference.write_kv(k, v, expected, slots)
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)


def test_a_pool_of_more_elements_than_int32_counts(triton_backend: TritonBackend) -> None:
    """Nearly all of its 4 GiB are never touched, so they take no memory; the sequence has the last blocks."""
    problem = build(Case("large", ((3, 40),), heads=(2, 1), dtype=torch.float16))
    num_blocks = (1 << 31) // (2 * 16 * 64) + 9
    pool = torch.empty(num_blocks, 2, 16, 1, 64, dtype=torch.float16)
    shift = num_blocks - problem.kv.k.shape[0]
    pool[shift:, 0], pool[shift:, 1] = problem.kv.k, problem.kv.v
    expected_out, _ = problem.expected()
    problem.kv = KVView(pool[:, 0], pool[:, 1])
    problem.batch = replace(
        problem.batch, block_table=problem.batch.block_table + shift, slots=problem.batch.slots + 16 * shift
    )
    out, _ = problem.run(triton_backend)
    assert (out.double() - expected_out).abs().max() <= TOLERANCE[torch.float16]


def test_merging_weighs_parts_and_leaves_out_what_saw_nothing(triton_backend: TritonBackend) -> None:
    """Parts that saw nothing are not even read: they hold NaN here."""
    draw = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(4, 50, 6, 80, generator=draw), 30 * torch.randn(4, 50, 6, generator=draw)
    nothing = torch.rand(4, 50, 6, generator=draw) < 0.4
    nothing[:, 0] = True
    lses[nothing] = float("-inf")
    out, lse = torch.empty(50, 6, 80), torch.empty(50, 6)
    expected_out, expected_lse = torch.empty(50, 6, 80, dtype=torch.float64), torch.empty(50, 6, dtype=torch.float64)
    reference.merge_states(outs.double(), lses.double(), expected_out, expected_lse)
    outs[nothing] = float("nan")
    triton_backend.merge_states(outs, lses, out, lse)
    assert (out.double() - expected_out).abs().max() <= 2e-6
    assert torch.allclose(lse.double(), expected_lse, rtol=2e-7, atol=2e-6)
    assert (out[0] == 0).all()


def test_nothing_to_do_is_done_without_a_launch(triton_backend: TritonBackend) -> None:
    problem = build(Case("none", ((1, 4),)))
    empty = replace(problem.batch, cu_q=torch.zeros(2, dtype=torch.int32), slots=problem.batch.slots[:0])
    triton_backend.write_kv(problem.k[:0], problem.v[:0], problem.kv, empty.slots)
    assert triton_backend.attention_varlen(problem.q[:0], problem.kv, empty, sm_scale=1.0).shape == (0, 4, 64)


def test_what_it_cannot_do_is_refused_in_a_sentence(triton_backend: TritonBackend) -> None:
    problem = build(Case("refused", ((1, 4),), heads=(4, 2)))

    def attend(q: torch.Tensor, kv: object = problem.kv) -> None:
        triton_backend.attention_varlen(q, kv, problem.batch, sm_scale=1.0)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads evenly"):
        attend(problem.q[:, :3])
    with pytest.raises(ValueError, match=r"queries are torch\.float64"):
        attend(problem.q.double())
    with pytest.raises(ValueError, match="queries have heads of 32, and the cache's keys have 64"):
        attend(problem.q[..., :32])
    with pytest.raises(ValueError, match="the last dimension of q must be contiguous"):
        attend(problem.q.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="8-bit caches"):
        attend(problem.q, replace(problem.kv, k_scale=torch.ones(1)))
    wide = build(Case("wide", ((1, 4),), dim=264))
    with pytest.raises(ValueError, match="heads of 264 are more than this backend takes: 256"):
        wide.run(triton_backend)


def test_numpy_warns_of_nothing() -> None:
    """No 0/0 and no inf - inf on the way: the interpreter computes in numpy, which would warn of them."""
    problem = build(Case("warnings", ((4, 4), (1, 30)), heads=(4, 2), window=2, sinks=True, softcap=2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.run(TritonBackend("cpu", num_splits=3))
