"""The definition against torch's own attention on dense keys, and by hand where torch has none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from swapserve_kernels.reference import ReferenceBackend, attention_varlen, merge_states, write_kv
from swapserve_kernels.types import AttnBatch, KVView

from .cases import ALL, CASES, INDEXING, Case, Problem, build

EXACT = 1e-12
"""Float64 on both sides."""
PLAIN = [case for case in CASES + INDEXING if not (case.softcap or case.sinks or case.tree)]


def dense(problem: Problem, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence's queries and keys and values, float64 `[H, n, D]`, found without the code under test."""
    case, batch = problem.case, problem.batch
    count, length = case.spans[sequence]
    begin = sum(c for c, _ in case.spans[:sequence])
    rows = []
    for cache, new in ((problem.kv.k, problem.k), (problem.kv.v, problem.v)):
        old = [
            cache[int(batch.block_table[sequence, place // case.page]), place % case.page]
            for place in range(length - count)
        ]
        rows.append(torch.stack([*old, *new[begin : begin + count].to(cache.dtype)]).double().transpose(0, 1))
    return problem.q[begin : begin + count].double().transpose(0, 1), rows[0], rows[1]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_agrees_with_torch(case: Case) -> None:
    problem = build(case)
    answer, _ = problem.expected()
    row = 0
    for sequence, (count, length) in enumerate(case.spans):
        if count:
            q, k, v = dense(problem, sequence)
            ahead = torch.arange(length) - torch.arange(length - count, length)[:, None]
            mask = (ahead <= 0) & (ahead > -(case.window or length))
            wanted = scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(answer[row : row + count], wanted, rtol=0, atol=EXACT)
        row += count


def by_hand(problem: Problem, sequence: int, query: int, head: int) -> tuple[list[float], float]:
    """Output and lse of one query and head, one number at a time."""
    case, group = problem.case, problem.case.heads[0] // problem.case.heads[1]
    count, length = case.spans[sequence]
    q, k, v = dense(problem, sequence)
    position = length - count + query
    begin = sum(c for c, _ in case.spans[:sequence])
    weights = {}
    for key in range(length):
        if problem.batch.tree_mask is not None and key >= length - count:
            new = key - (length - count)
            seen = bool(int(problem.batch.tree_mask[begin + query, new // 32]) >> new % 32 & 1)
        else:
            seen = key <= position
        if seen and (not case.window or key > position - case.window):
            score = float(q[head, query] @ k[head // group, key]) * problem.options["sm_scale"]
            weights[key] = math.exp(case.softcap * math.tanh(score / case.softcap) if case.softcap else score)
    sinks = problem.options["sinks"]
    total = sum(weights.values()) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
    made = sum(weight / total * v[head // group, key] for key, weight in weights.items())
    assert isinstance(made, Tensor)
    return made.tolist(), math.log(total)


@pytest.mark.parametrize("case", [c for c in CASES if c.softcap or c.sinks or c.tree], ids=lambda case: case.name)
def test_agrees_with_sums_by_hand(case: Case) -> None:
    problem = build(case)
    answer, lse = problem.expected()
    row = 0
    for sequence, (count, _) in enumerate(case.spans):
        for query in {0, count // 2, count - 1} if count else set():
            made, total = by_hand(problem, sequence, query, 1)
            torch.testing.assert_close(answer[row + query, 1].tolist(), made, rtol=0, atol=EXACT)
            assert abs(float(lse[row + query, 1]) - total) < EXACT
        row += count


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_single_precision_is_within_the_tolerances_of_the_cases(case: Case) -> None:
    problem = build(case)
    wanted, wanted_lse = problem.expected()
    answer, lse = problem.run(ReferenceBackend())
    assert answer.dtype == case.dtype
    torch.testing.assert_close(answer.double(), wanted, rtol=0, atol=case.tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=case.tolerance)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """A tree's query that may not even see itself, in a sequence without context."""
    batch = AttnBatch(
        cu_q=torch.tensor([0, 2], dtype=torch.int32),
        kv_len=torch.tensor([2], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        slots=torch.arange(2),
        tree_mask=torch.tensor([[0], [2]], dtype=torch.int32),
        max_q=2,
        max_kv=2,
    )
    kv = ReferenceBackend().allocate(1, 4, 1, 8, torch.float32, "cpu")
    kv.v.fill_(3.0)
    lse = torch.zeros(2, 1)
    answer = attention_varlen(torch.ones(2, 1, 8), kv, batch, sm_scale=1.0, lse=lse)
    assert answer[0].eq(0).all() and answer[1].eq(3).all()
    assert lse[0] == float("-inf") and lse[1] == 0


def test_without_a_causal_mask_every_key_is_seen() -> None:
    problem = build(Case("all", ((3, 7),)))
    problem.run(ReferenceBackend())
    q, k, v = dense(problem, 0)
    answer = attention_varlen(problem.q.double(), problem.kv, problem.batch, sm_scale=64**-0.5, causal=False)
    wanted = scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(answer, wanted, rtol=0, atol=EXACT)


def test_merging_parts_gives_the_whole() -> None:
    """Keys in three parts, one of which a query sees nothing of."""
    scores, values = torch.randn(5, 4, 9, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    scores[0, :, 3:6] = float("-inf")
    parts = [(scores[..., a:b], values[a:b]) for a, b in ((0, 3), (3, 6), (6, 9))]
    outs = torch.stack([torch.softmax(s, -1).nan_to_num(0.0) @ v for s, v in parts])
    lses = torch.stack([s.logsumexp(-1) for s, _ in parts])
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    merge_states(outs, lses, out, lse)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ values, rtol=0, atol=EXACT)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=EXACT)


def test_merging_nothing_gives_nothing() -> None:
    out, lse = torch.ones(1, 1, 4), torch.ones(1, 1)
    merge_states(torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), float("-inf")), out, lse)
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


def test_a_write_touches_its_slots_only() -> None:
    kv = KVView(torch.full((3, 4, 2, 8), 7.0), torch.full((3, 4, 2, 8), 7.0))
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(k, v, kv, torch.tensor([9, -1, 4]))
    for cache, new in ((kv.k, k), (kv.v, v)):
        assert cache[2, 1].equal(new[0]) and cache[1, 0].equal(new[2])
        assert cache.ne(7.0).sum() == 2 * 2 * 8


def test_an_uneven_group_is_refused() -> None:
    kv = ReferenceBackend().allocate(1, 4, 2, 8, torch.float32, "cpu")
    problem = build(Case("three", ((1, 1),), heads=(4, 2), dim=8))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads evenly"):
        attention_varlen(torch.ones(1, 3, 8), kv, problem.batch, sm_scale=1.0)
