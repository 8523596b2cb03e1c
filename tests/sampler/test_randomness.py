"""The same seed gives the same tokens, and the draws are fair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_kit import chi_square, fixed_model, generate, hashed_model, judge, make_request, plain_distribution

from swapserve.batch import Slice
from swapserve.sampler import Sampler
from swapserve.sampling.randomness import Stream, uniforms
from swapserve.sampling.wide import draw

KINDS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 8, "top_p": 0.8, "presence_penalty": 0.5}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_seeded_request_does_not_see_its_neighbours(kind: dict[str, float]) -> None:
    """H48: alone, beside 7 without a seed, beside 7 that come and go; five times each."""
    model = hashed_model(48)
    seeded = dict(seed=42, temperature=0.8, **kind)
    alone = generate(Sampler(48), make_request(**seeded), model, 12)
    assert len(set(alone)) > 3
    for trial in range(5):
        for come_and_go in (False, True):
            sampler, request = Sampler(48), make_request(**seeded)
            others = [make_request([trial, i], name=str(i), key=trial * 7 + i, **KINDS[i % 5]) for i in range(7)]
            for step in range(12):
                beside = others[step % 4 : step % 4 + step % 5] if come_and_go else others
                batch = [*beside[: len(beside) // 2], request, *beside[len(beside) // 2 :]]
                for member, verdict in zip(batch, judge(sampler, batch, model), strict=True):
                    member.accept(verdict.tokens)
            assert list(request.output) == alone


def test_a_wide_row_is_the_same_in_every_place_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 50_257, generator=generator) * 3
    requests = [make_request(name=str(i), seed=i, temperature=0.8) for i in range(8)]
    sampler = Sampler(50_257)
    together = judge(sampler, requests, [lambda context, row=row: row for row in rows], wants_probs=True)
    for request, row, verdict in zip(requests, rows, together, strict=True):
        (alone,) = judge(sampler, [request], lambda context, row=row: row, wants_probs=True)
        assert alone.tokens == verdict.tokens and torch.equal(alone.probs, verdict.probs)


def test_chunks_preemption_and_a_restart_change_nothing() -> None:
    """H48: the number drawn depends on the position, not on the steps it took to get there."""
    model = hashed_model(48)
    whole = generate(Sampler(48), make_request(seed=-7), model, 10)
    request = make_request(seed=-7)
    while request.num_output_tokens < 10:
        request.computed = request.num_output_tokens % 3  # given up, and computed again in two pieces
        pieces = [Slice(request, request.computed, 1), Slice(request, request.computed + 1, request.pending - 1)]
        first, second = (judge(Sampler(48), [piece], model)[0] for piece in pieces)
        assert not first.tokens
        request.accept(second.tokens)
    assert list(request.output) == whole


def test_other_seeds_and_positions_give_other_tokens() -> None:
    model = fixed_model(*[0.0] * 50)
    outputs = {tuple(generate(Sampler(50), make_request(seed=seed), model, 8)) for seed in range(20)}
    assert len(outputs) == 20 and all(len(set(output)) > 3 for output in outputs)


def test_uniforms_are_even_and_unrelated_over_seeds_positions_and_streams() -> None:
    seeds, positions = np.divmod(np.arange(40_000), 200)
    grid = torch.stack([torch.from_numpy(uniforms(seeds.tolist(), positions.tolist(), stream)) for stream in Stream])
    assert grid.min() >= 0 and grid.max() < 1
    for numbers in grid:
        assert chi_square(torch.histc(numbers, 64, 0, 1), torch.ones(64)) > 1e-3
    correlation = torch.corrcoef(grid) - torch.eye(len(Stream))
    by_position = torch.corrcoef(grid[0].view(200, 200)) - torch.eye(200)
    by_seed = torch.corrcoef(grid[0].view(200, 200).T) - torch.eye(200)
    assert correlation.abs().max() < 0.03 and by_position.abs().max() < 0.4 and by_seed.abs().max() < 0.4


def test_seeds_wrap_and_the_numbers_are_pinned() -> None:
    """A change of these numbers changes what every seed gives: users would notice."""
    same = uniforms([-1, 2**64 - 1], [3, 3], Stream.DRAW)
    assert same[0] == same[1]
    assert len(set(uniforms([5, 5 + 2**32, 5 + 2**63], [3] * 3, Stream.DRAW))) == 3
    pinned = uniforms([0, 42, 42, 42], [0, 5, 6, 5], Stream.DRAW)
    assert pinned.tolist() == [0.6524484863740322, 0.7695524198139898, 0.6571014429972566, 0.7695524198139898]
    assert uniforms([42], [5], Stream.ACCEPT)[0] != pinned[1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [12, 64, 97])
def test_draws_follow_the_distribution(kind: dict[str, float], size: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1.5
    requests = [make_request(name=str(i), key=i, temperature=1.2, **kind) for i in range(4000)]
    tokens = [verdict.tokens[0] for verdict in judge(Sampler(size), requests, fixed_model(*row))]
    observed = torch.bincount(torch.tensor(tokens), minlength=size)
    assert chi_square(observed, torch.tensor(plain_distribution(row.tolist(), requests[0].params))) > 1e-3


def test_draw_inverts_the_cumulative_sum() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    places = [0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53]
    assert [int(draw(weights, torch.tensor([u], dtype=torch.float64), 2)) for u in places] == [1, 1, 3, 3, 5, 5]
    # In float32 the first chunk's sum is rounded up, past what its two tokens add up to.
    weights = torch.tensor([[1.0, 1.5 * 2**-24, 0.0, 0.0]])
    assert int(draw(weights, torch.tensor([1 - 2**-53], dtype=torch.float64), 2)) == 1
    nothing = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    assert draw(nothing, torch.zeros(3, dtype=torch.float64), 1).tolist() == [-1, -1, -1]
