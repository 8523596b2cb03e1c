"""The CPU backend's two engines against the definition in float64, and the faults that the comparison must see."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swapserve_kernels import AttnBatch, KVView, cpu, cpu_numba, cpu_torch
from swapserve_kernels.cpu import CpuBackend

from .cases import ALL, DECODE, LONG, MIXED, Case, Problem, Spans, build

ENGINES = ("numba", "torch")


def check(problem: Problem, answer: tuple[Tensor, Tensor]) -> None:
    wanted = problem.expected()
    assert answer[0].dtype == problem.case.dtype
    for mine, right in zip(answer, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=problem.case.tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_computes_the_definition(case: Case, engine: str) -> None:
    problem = build(case)
    check(problem, problem.run(CpuBackend(engine)))


@pytest.mark.parametrize("case", [case for case in ALL if case.spans in (LONG, DECODE)], ids=lambda case: case.name)
def test_keys_in_several_pieces_are_joined_again(case: Case) -> None:
    """Two threads split a long sequence's keys."""
    torch.set_num_threads(2)
    problem = build(case)
    check(problem, problem.run(CpuBackend("numba")))


@pytest.mark.parametrize("case", [case for case in ALL if case.spans == MIXED], ids=lambda case: case.name)
def test_blocks_of_queries_join_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in blocks of a few queries, as a prompt of thousands has them."""
    monkeypatch.setattr(cpu_torch, "BLOCK_QUERIES", 7)
    problem = build(case)
    check(problem, problem.run(CpuBackend("torch")))


def swapped_blocks(problem: Problem) -> None:
    table = problem.batch.block_table
    table[:, [0, 1]] = table[:, [1, 0]]


def window_off_by_one(problem: Problem) -> None:
    problem.options["window"] -= 1


def last_key_dropped(problem: Problem) -> None:
    problem.batch.kv_len.sub_(1)


def scale_twice(problem: Problem) -> None:
    problem.q *= problem.options["sm_scale"]


def sinks_forgotten(problem: Problem) -> None:
    problem.options["sinks"] = None


def softcap_forgotten(problem: Problem) -> None:
    problem.options["softcap"] = 0.0


def neighbours_head(problem: Problem) -> None:
    problem.q.copy_(problem.q.roll(1, dims=1))


@pytest.mark.parametrize(
    "fault",
    [
        swapped_blocks,
        window_off_by_one,
        last_key_dropped,
        scale_twice,
        sinks_forgotten,
        softcap_forgotten,
        neighbours_head,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_comparison_sees_a_fault(fault: Any, dtype: torch.dtype) -> None:
    """Well over the tolerance, so that none of these hides below it."""
    spans = ((1, 40), (2, 50), (30, 45))
    case = Case("faulty", spans, heads=(4, 2), window=36, softcap=3.0, sinks=True, dtype=dtype)
    problem, sound = build(case), build(case)
    fault(problem)
    answer, _ = problem.run(CpuBackend("numba"))
    margin = 100 if dtype == torch.float32 else 2
    assert not (answer.double() - sound.expected()[0]).abs().max() < margin * case.tolerance


class Watched(np.ndarray):
    """An array that remembers which of its entries were read."""

    read: set[tuple[int, int]]

    def __getitem__(self, place: Any) -> Any:
        self.read.add((int(place[0]), int(place[1])))
        return np.asarray(self)[place]


@pytest.mark.parametrize("window", [0, 20])
def test_no_table_entry_outside_the_keys_in_sight_is_read(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither past a sequence's keys nor behind its window, where blocks may have been given to others."""
    case = Case("watched", ((1, 16), (2, 33), (1, 70), (0, 40)), window=window)
    problem = build(case)
    table = problem.batch.block_table.numpy().view(Watched)
    table.read = set()
    monkeypatch.setattr(cpu_numba, "_attend_piece", cpu_numba._attend_piece.py_func)
    plain = cpu_numba._attend_tasks.py_func

    def watched(*arguments: Any) -> None:
        plain(*(table if isinstance(each, np.ndarray) and each.dtype == np.int32 else each for each in arguments))

    monkeypatch.setattr(cpu_numba, "_attend_tasks", watched)
    monkeypatch.setattr(cpu_numba, "attend_pages", cpu_numba.attend_pages.py_func)
    check(problem, problem.run(CpuBackend("numba")))
    in_sight = {
        (sequence, key // 16)
        for sequence, (count, length) in enumerate(case.spans)
        if count
        for key in range(max(0, length - count + 1 - window) if window else 0, length)
    }
    assert table.read == in_sight


def test_decodes_and_drafts_go_over_pages_and_prompts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    plain = cpu.attend_sequences

    def counted(sequences: list[int], *rest: Any, **options: Any) -> None:
        products.extend(sequences)
        plain(sequences, *rest, **options)

    monkeypatch.setattr(cpu, "attend_sequences", counted)
    problem = build(Case("both", ((1, 20), (5, 30), (40, 40))))
    problem.run(CpuBackend("numba"))
    assert products == [2]


def test_two_threads_share_a_backend() -> None:
    """Each runs batches of its own on one backend, as two executors over one model do."""
    torch.set_num_threads(2)
    backend = CpuBackend("numba")
    problems = [build(Case("first", LONG, heads=(14, 2))), build(Case("second", ((1, 600), (2, 555)), heads=(14, 2)))]
    for problem in problems:
        problem.run(backend)
    start, wrong = threading.Barrier(2), []

    def work(problem: Problem) -> None:
        wanted, _ = problem.expected()
        start.wait()
        for _ in range(50):
            batch = replace(problem.batch)
            answer = backend.attention_varlen(problem.q, problem.kv, batch, **problem.options)
            if not (answer.double() - wanted).abs().max() <= problem.case.tolerance:
                wrong.append(problem.case.name)

    threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spans", [((1, 40), (1, 50)), ((30, 40), (26, 50))])
def test_what_is_not_finite_shows_and_stays_in_its_sequence(engine: str, dtype: torch.dtype, spans: Spans) -> None:
    """A model gone wrong must be seen (H50): NaN or infinite keys and values in use are neither hidden nor spread."""
    for bad in (float("nan"), float("inf")):
        for which in ("k", "v"):
            problem = build(Case("bad", spans, dtype=dtype))
            getattr(problem, which)[0, 0, 5] = bad
            problem.q[:, :, 5] = 1.0
            answer, _ = problem.run(CpuBackend(engine))
            first = spans[0][0]
            assert not answer[:first].isfinite().flatten(1).all(1).any()
            assert answer[first:].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_of_a_step_may_differ_and_steps_do_too(engine: str) -> None:
    """What is worked out once a batch depends on the window and the heads, and ends with the batch."""
    backend = CpuBackend(engine)
    for spans in (MIXED, DECODE, MIXED):
        problem = build(Case("full", spans, heads=(4, 2)))
        for window in (0, 9, 0):
            problem.options["window"] = window
            check(problem, problem.run(backend))
        fewer = build(Case("other heads", spans, heads=(8, 8)))
        check(fewer, replace(fewer, batch=replace(problem.batch, slots=fewer.batch.slots)).run(backend))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_write_touches_its_slots_only(engine: str, dtype: torch.dtype) -> None:
    """From rows that are views into one product, as a fused projection gives them."""
    backend = CpuBackend(engine)
    kv = backend.allocate(3, 4, 2, 8, dtype, "cpu")
    rows = torch.randn(3, 6, 8, dtype=dtype)
    backend.write_kv(rows[:, 2:4], rows[:, 4:], kv, torch.tensor([9, -1, 4]))
    for cache, new in ((kv.k, rows[:, 2:4]), (kv.v, rows[:, 4:])):
        assert cache[2, 1].equal(new[0]) and cache[1, 0].equal(new[2])
        assert cache.ne(0).sum() == 2 * 2 * 8


@pytest.mark.parametrize("engine", ENGINES)
def test_queries_may_be_views_and_the_output_may_be_given(engine: str) -> None:
    problem = build(Case("views", MIXED))
    wide = torch.randn(4, len(problem.q), 128)
    wide[:, :, 64:] = problem.q.transpose(0, 1)
    problem.q = wide[:, :, 64:].transpose(0, 1)
    out = torch.full(problem.q.shape, float("nan"))
    problem.options["out"] = out
    answer, lse = problem.run(CpuBackend(engine))
    assert answer is out
    del problem.options["out"]
    check(problem, (out, lse))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", [2, 128])
def test_a_tree_may_look_ahead(engine: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask's bits count as they are, whatever the order of the drafts; and a query that sees nothing gets zeros."""
    monkeypatch.setattr(cpu_torch, "BLOCK_QUERIES", block)
    problem = build(Case("ahead", ((3, 3), (4, 20)), tree=True))
    assert problem.batch.tree_mask is not None
    problem.batch.tree_mask[:] = torch.tensor([0b110, 0b111, 0b000, 0b1111, 0b1000, 0b0010, 0b1010])[:, None]
    answer, lse = problem.run(CpuBackend(engine))
    check(problem, (answer, lse))
    assert answer[2].eq(0).all() and lse[2].eq(float("-inf")).all()


def test_prepared_shapes_compile_nothing_more() -> None:
    """Sinks, soft caps, windows, threads and sizes are arguments of one compiled version."""
    backend = CpuBackend("numba")
    functions = (cpu_numba.attend_pages, cpu_numba.write_pages)
    for dtype in (torch.float32, torch.bfloat16):
        backend.prepare(4, 2, 32, dtype)
        compiled = [list(function.signatures) for function in functions]
        for spans in (DECODE, MIXED):
            plain = build(Case("plain", spans, heads=(4, 2), dim=32, dtype=dtype))
            rich = build(Case("rich", spans, heads=(4, 2), dim=32, dtype=dtype, window=5, softcap=2.0, sinks=True))
            for problem in (plain, rich):
                problem.run(backend)
        assert [list(function.signatures) for function in functions] == compiled


@pytest.mark.parametrize("engine", ENGINES)
def test_what_cannot_be_computed_is_refused(engine: str) -> None:
    problem = build(Case("refused", DECODE))
    backend = CpuBackend(engine)
    scaled = KVView(problem.kv.k, problem.kv.v, torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="8-bit caches are not supported"):
        backend.attention_varlen(problem.q, scaled, problem.batch, sm_scale=1.0)
    with pytest.raises(ValueError, match="8-bit caches are not supported"):
        backend.write_kv(problem.k, problem.v, scaled, problem.batch.slots)
    uneven = KVView(*(cache.expand(-1, -1, 3, -1) for cache in (problem.kv.k, problem.kv.v)))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads evenly"):
        backend.attention_varlen(problem.q, uneven, problem.batch, sm_scale=1.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_queries_is_no_step(engine: str) -> None:
    batch = AttnBatch(
        cu_q=torch.zeros(2, dtype=torch.int32),
        kv_len=torch.tensor([5], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=torch.zeros(0, dtype=torch.int64),
        tree_mask=None,
        max_q=0,
        max_kv=5,
    )
    backend = CpuBackend(engine)
    kv = backend.allocate(1, 16, 1, 32, torch.float32, "cpu")
    backend.write_kv(torch.empty(0, 1, 32), torch.empty(0, 1, 32), kv, batch.slots)
    assert backend.attention_varlen(torch.empty(0, 4, 32), kv, batch, sm_scale=1.0).shape == (0, 4, 32)
