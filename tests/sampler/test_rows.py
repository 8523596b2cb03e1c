"""Which positions go through the language-model head."""

from __future__ import annotations

import torch
from sampler_kit import hashed_model, judge, make_request

from swapserve.batch import Batch, Slice, Work
from swapserve.sampler import Sampler, plan_rows


def rows_of(*slices: Slice) -> list[int]:
    works = [Work(piece, [0] * piece.count, [0]) for piece in slices]
    return plan_rows(Batch(works, 16)).index


def test_only_the_rows_that_sample_are_asked_for() -> None:
    """H39: a half-done prompt takes positions in the batch and no row."""
    half_done = make_request(range(20))
    decode = make_request(range(3), output=[7])
    drafted = make_request(range(3), output=[7, 8], draft=[4, 5])
    whole = make_request(range(5))
    slices = [Slice(half_done, 4, 6), Slice(decode, 3, 1), Slice(drafted, 4, 3), Slice(whole, 0, 5)]
    assert rows_of(*slices) == [6, 7, 8, 9, 14]


def test_a_resumed_request_with_a_draft_in_one_slice() -> None:
    resumed = make_request(range(4), output=[7, 8], draft=[4])
    assert rows_of(Slice(resumed, 0, 7)) == [5, 6]


def test_a_draft_that_the_plan_has_cut() -> None:
    assert rows_of(Slice(make_request(range(4), output=[7], draft=[4, 5, 6]), 4, 2)) == [0, 1]


def test_prompt_logprobs_need_every_row_that_predicts_a_prompt_token() -> None:
    request = make_request(range(6), prompt_logprobs=0)
    other = make_request(range(2))
    assert rows_of(Slice(other, 0, 2), Slice(request, 0, 3)) == [1, 2, 3, 4]
    request.prompt_logprobs = [None] * 4
    assert rows_of(Slice(request, 3, 3)) == [0, 1, 2]  # positions 3 and 4 predict 4 and 5; position 5 samples


def test_a_prompt_computed_again_gives_no_entry_twice() -> None:
    request = make_request(range(6), prompt_logprobs=0)
    request.prompt_logprobs = [None] * 4  # of tokens 0 to 3; then it was preempted
    (verdict,) = judge(Sampler(8), [Slice(request, 0, 6)], hashed_model(8))
    assert rows_of(Slice(request, 0, 6)) == [3, 4, 5]
    assert [entry.token for entry in verdict.prompt_logprobs or ()] == [4, 5]
    assert rows_of(Slice(request, 0, 3)) == []


def test_no_rows_no_call() -> None:
    def logits(begin: int, end: int) -> object:
        raise AssertionError

    request = make_request(range(6))
    batch = Batch([Work(Slice(request, 0, 3), [0, 1, 2], [0])], 16)
    (verdict,) = Sampler(8).judge(batch, plan_rows(batch), logits)  # type: ignore[arg-type]
    assert verdict.tokens == () and verdict.error is None


def test_logits_are_asked_for_in_blocks(monkeypatch) -> None:
    monkeypatch.setattr("swapserve.sampler.BLOCK_BYTES", 3 * 8 * 4)
    model, asked = hashed_model(8), []
    requests = [make_request([i, i], name=str(i), temperature=0) for i in range(8)]
    batch = Batch([Work(Slice(r, 0, 2), [0, 0], [0]) for r in requests], 16)

    def logits(begin: int, end: int):
        asked.append((begin, end))
        return torch.stack([model((i, i)) for i in range(begin, end)])

    verdicts = Sampler(8).judge(batch, plan_rows(batch), logits)
    assert asked == [(0, 3), (3, 6), (6, 8)]
    assert [verdict.tokens for verdict in verdicts] == [[int(model((i, i)).argmax())] for i in range(8)]
