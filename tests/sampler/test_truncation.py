"""min_p, top_k and top_p against sorting everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampler_kit import fixed_model, judge, make_request, plain_distribution

from swapserve.params import SamplingParams
from swapserve.sampler import Sampler
from swapserve.sampling import truncation
from swapserve.sampling.wide import chunk_width

SIZES = [1, 2, 7, 12, 64, 97, 1000]
"""One chunk, primes, squares: every way of looking at a row in chunks."""


def near_the_edge(logits: list[float], params: SamplingParams) -> bool:
    """Whether rounding decides which token is the last of the nucleus, or passes min_p."""
    around = (params.top_p - 1e-6, params.top_p + 1e-6), (params.min_p - 1e-6, params.min_p + 1e-6)
    changes = [{"top_p": p} for p in around[0] if 0 < p < 1 and params.top_p < 1]
    changes += [{"min_p": p} for p in around[1] if p > 0 and params.min_p > 0]
    kept = [p > 0 for p in plain_distribution(logits, params)]
    return any([p > 0 for p in plain_distribution(logits, params.model_copy(update=c))] != kept for c in changes)


@settings(max_examples=250, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 40, 900, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.37, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_the_distribution_is_that_of_sorting_everything(
    size, seed, spread, coarse, temperature, top_k, top_p, min_p
) -> None:
    """Also where many logits are equal, as those of a bfloat16 model are."""
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    row = (row * 2).round() / 2 if coarse else row
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not near_the_edge(row.tolist(), params))
    flat, peaked = torch.zeros(size), torch.linspace(30, -30, size)
    kind = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    requests = [make_request(name=str(i), key=seed + i, **kind) for i in range(3)]
    rows = [row, flat, peaked]
    verdicts = judge(Sampler(size), requests, [fixed_model(*row) for row in rows], wants_probs=True)
    for row, verdict in zip(rows, verdicts, strict=True):
        expected = torch.tensor(plain_distribution(row.tolist(), params))
        if not near_the_edge(row.tolist(), params):
            torch.testing.assert_close(verdict.probs[0], expected, atol=2e-6, rtol=1e-4)
            assert expected[verdict.tokens[0]] > 0


def test_rows_of_every_kind_in_one_block_keep_to_themselves() -> None:
    kinds = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}, {"temperature": 0.0}]
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(48, generator=generator) * 3 for _ in kinds]
    requests = [make_request(name=str(i), key=i, **kind) for i, kind in enumerate(kinds)]
    together = judge(Sampler(48), requests, [fixed_model(*row) for row in rows], wants_probs=True)
    for request, row, verdict in zip(requests, rows, together, strict=True):
        (alone,) = judge(Sampler(48), [request], fixed_model(*row), wants_probs=True)
        assert alone.tokens == verdict.tokens
        if request.params.temperature:
            assert torch.equal(alone.probs, verdict.probs)
            expected = torch.tensor(plain_distribution(row.tolist(), request.params))
            torch.testing.assert_close(verdict.probs[0], expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("spread, looks", [(9.0, 1), (4.0, 2), (1.0, 3)], ids=["peaked", "wider", "flat"])
def test_a_nucleus_wider_than_the_guess_is_found_whole(monkeypatch, spread: float, looks: int) -> None:
    """top_p alone looks at few tokens first, and at more only for rows that need it."""
    size, calls = 4096, []
    original = truncation.tokens_above
    monkeypatch.setattr(truncation, "GUESSED_CHUNKS", 8)
    monkeypatch.setattr(truncation, "tokens_above", lambda *args: calls.append(len(args[0])) or original(*args))
    row = torch.randn(size, generator=torch.Generator().manual_seed(3)) * spread
    peaked = torch.linspace(40, -40, size)
    requests = [make_request(name=str(i), top_p=0.9) for i in range(3)]
    models = [fixed_model(*values) for values in (peaked, row, peaked)]
    verdicts = judge(Sampler(size), requests, models, wants_probs=True)
    assert calls == [3, 1, 1][:looks]
    for values, verdict in zip((peaked, row, peaked), verdicts, strict=True):
        expected = torch.tensor(plain_distribution(values.tolist(), requests[0].params))
        torch.testing.assert_close(verdict.probs[0], expected, atol=2e-6, rtol=1e-4)


def test_top_k_keeps_all_that_equal_the_last() -> None:
    (verdict,) = judge(Sampler(4), [make_request(top_k=2)], fixed_model(1.0, 0.0, 1.0, 1.0), wants_probs=True)
    torch.testing.assert_close(verdict.probs[0], torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]))


def test_min_p_keeps_what_equals_its_share() -> None:
    (verdict,) = judge(Sampler(3), [make_request(min_p=1.0)], fixed_model(2.0, 0.0, 2.0), wants_probs=True)
    assert verdict.probs[0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("size", [32_768, 50_257])
@pytest.mark.parametrize("spread", [1.5, 3.0], ids=["wide", "narrow"])
def test_large_vocabularies_with_many_equal_logits(size: int, spread: float) -> None:
    """Logits of a bfloat16 model: the edge of a truncation nearly always falls among equals."""
    kinds = [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {"top_k": 200, "top_p": 0.8}, {"top_k": 9000}, {}]
    row = (torch.randn(size, generator=torch.Generator().manual_seed(8)) * spread).bfloat16().float()
    requests = [make_request(name=str(i), key=i, temperature=0.8, **kind) for i, kind in enumerate(kinds)]
    for request, verdict in zip(requests, judge(Sampler(size), requests, lambda _: row, wants_probs=True), strict=True):
        expected = torch.tensor(plain_distribution(row.tolist(), request.params))
        assert torch.equal(verdict.probs[0] > 0, expected > 0)
        torch.testing.assert_close(verdict.probs[0], expected, atol=1e-6, rtol=1e-4)


def test_top_p_keeps_the_lower_ids_of_equals() -> None:
    (verdict,) = judge(Sampler(8), [make_request(top_p=0.5)], fixed_model(*[1.0] * 8), wants_probs=True)
    assert verdict.probs[0].tolist() == [0.25] * 4 + [0.0] * 4


def test_a_forbidden_token_is_never_drawn_however_many_are_kept() -> None:
    model = fixed_model(0.0, -math.inf, 0.0, 0.0)
    for kind in ({}, {"top_k": 4}, {"top_k": 3, "min_p": 0.1}, {"top_p": 0.999}):
        requests = [make_request(name=str(i), key=i, **kind) for i in range(200)]
        tokens = {verdict.tokens[0] for verdict in judge(Sampler(4), requests, model)}
        assert tokens == {0, 2, 3}


@pytest.mark.parametrize("size", [1, 5, 64, 97, 32_000, 50_257, 128_256, 151_936, 262_144, 262_147])
def test_chunks_divide_the_vocabulary(size: int) -> None:
    width = chunk_width(size)
    assert size % width == 0
    assert width == size or max(width, size // width) <= 32 * math.sqrt(size)
