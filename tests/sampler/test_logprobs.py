"""Log-probabilities of output and prompt tokens: raw, of the right rows, and finite."""

from __future__ import annotations

import json
import math

import pytest
import torch
from sampler_kit import fixed_model, hashed_model, judge, make_request

from swapserve.batch import Slice
from swapserve.request import LOGPROB_FLOOR, Draft, TokenLogprobs
from swapserve.sampler import Sampler

VOCAB = 48


def plain_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    row = torch.log_softmax(logits.double(), 0).tolist()
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    rank = 1 + sum(value > row[token] for value in row)
    return TokenLogprobs(token, row[token], rank, tuple((t, row[t]) for t in order[:num_top]))


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (found.token, found.rank, len(found.top)) == (expected.token, expected.rank, len(expected.top))
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    values = [found.logprob, *(value for _, value in found.top)]
    assert values == pytest.approx([expected.logprob, *(value for _, value in expected.top)], abs=1e-4)


def test_values_are_of_the_right_rows_in_a_mixed_step() -> None:
    """H39: a prompt's second chunk, a decode with 3 drafts of which 1 is accepted, a plain decode."""
    model = hashed_model(VOCAB)
    first = int(model((1, 5)).argmax())
    second = int(model((5, first)).argmax())
    wrong = (second + 1) % VOCAB
    chunk = make_request(range(12), name="chunk", logprobs=2, temperature=0)
    drafted = make_request([1], name="drafted", output=[5], draft=[first, wrong, 7], logprobs=2, temperature=0)
    plain = make_request([2], name="plain", output=[6], logprobs=2, temperature=0)
    verdicts = judge(Sampler(VOCAB), [Slice(chunk, 5, 4), drafted, plain], model)
    assert not verdicts[0].tokens and verdicts[0].logprobs is None
    assert verdicts[1].tokens == [first, second]
    for request, verdict in zip((drafted, plain), verdicts[1:], strict=True):
        context = list(request.tokens)
        assert len(verdict.logprobs) == len(verdict.tokens)
        for token, entry in zip(verdict.tokens, verdict.logprobs, strict=True):
            assert_close(entry, plain_logprobs(model(tuple(context)), token, 2))
            context.append(token)


@pytest.mark.parametrize("block_rows", [1, 3, 100])
def test_prompt_logprobs_do_not_depend_on_chunks(monkeypatch, block_rows: int) -> None:
    """H45: values as unchunked, one entry a prompt token but the first, whatever else is in the step."""
    monkeypatch.setattr("swapserve.sampler.BLOCK_BYTES", block_rows * VOCAB * 4)
    model, sampler = hashed_model(VOCAB), Sampler(VOCAB)
    prompt = [(7 * i * i + 3) % VOCAB for i in range(40)]
    request = make_request(prompt, prompt_logprobs=1, logprobs=0, temperature=0.7, key=4)
    entries: list[TokenLogprobs | None] = []
    for start in range(0, 40, 7):
        beside = make_request([3], name="beside", output=[4], draft=[5], logprobs=3, frequency_penalty=1.0)
        piece = Slice(request, start, min(7, 40 - start))
        _, verdict, _ = judge(sampler, [beside, piece, beside], model)
        entries += [*([] if entries else [None]), *(verdict.prompt_logprobs or ())]
        request.prompt_logprobs = entries
    assert len(entries) == 40 and entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert_close(entry, plain_logprobs(model(tuple(prompt[:position])), prompt[position], 1))
    assert_close(verdict.logprobs[0], plain_logprobs(model(tuple(prompt)), verdict.tokens[0], 0))
    assert judge(sampler, [Slice(request, 39, 1)], model)[0].prompt_logprobs is None  # nothing is owed any more


def test_they_are_raw_and_the_floor_stands_for_minus_infinity() -> None:
    """H46: logit_bias and top_k do not show, and strict JSON can hold every value."""
    values = [1.0, -math.inf, 0.5, 3.0]
    kinds = [{"temperature": 1, "top_k": 1}, {"temperature": 0.1, "logit_bias": {3: -100.0}}]
    requests = [make_request([1], name=str(i), logprobs=5, **kind) for i, kind in enumerate(kinds)]
    scored = make_request([0, 1], name="scored", prompt_logprobs=1, temperature=0)
    *verdicts, prompt = judge(Sampler(4), [*requests, scored], fixed_model(*values))
    for verdict in verdicts:
        (entry,) = verdict.logprobs
        assert_close(
            TokenLogprobs(entry.token, entry.logprob, entry.rank), plain_logprobs(torch.tensor(values), entry.token, 0)
        )
        assert [token for token, _ in entry.top] == [3, 0, 2, 1] and entry.top[-1][1] == LOGPROB_FLOOR
        json.dumps([entry.logprob, entry.top], allow_nan=False)
    assert verdicts[0].logprobs[0].rank == 1 and verdicts[1].logprobs[0].rank == 2
    (entry,) = prompt.prompt_logprobs
    assert (entry.token, entry.logprob, entry.rank, entry.top) == (1, LOGPROB_FLOOR, 4, entry.top)


def test_none_are_computed_for_rows_that_do_not_ask(monkeypatch) -> None:
    scored = []
    from swapserve.sampling import logprobs as module

    original = module.token_logprobs
    monkeypatch.setattr(
        "swapserve.sampler.token_logprobs", lambda raw, *rest: scored.append(len(raw)) or original(raw, *rest)
    )
    requests = [make_request(name=str(i), logprobs=0 if i == 3 else None, temperature=i % 2) for i in range(6)]
    verdicts = judge(Sampler(VOCAB), requests, hashed_model(VOCAB))
    assert scored == [1]
    assert [verdict.logprobs is not None for verdict in verdicts] == [i == 3 for i in range(6)]
    judge(Sampler(VOCAB), requests[:3], hashed_model(VOCAB))
    assert scored == [1]


def test_equal_logits_rank_alike_and_the_lowest_id_comes_first() -> None:
    request = make_request(logprobs=3, temperature=0)
    (verdict,) = judge(Sampler(6), [request], fixed_model(0.0, 2.0, 1.0, 2.0, 1.0, 1.0))
    assert verdict.tokens == [1] and verdict.logprobs[0].rank == 1
    assert [token for token, _ in verdict.logprobs[0].top] == [1, 3, 2]


def test_sampled_drafts_score_what_they_emit() -> None:
    model = hashed_model(VOCAB)
    for key in range(20):
        draft = Draft((1, 2), torch.full((2, VOCAB), 1 / VOCAB))
        request = make_request([3, key], draft=draft, key=key, logprobs=4, temperature=2.0, top_k=30)
        (verdict,) = judge(Sampler(VOCAB), [request], model)
        context = list(request.tokens)
        for token, entry in zip(verdict.tokens, verdict.logprobs, strict=True):
            assert_close(entry, plain_logprobs(model(tuple(context)), token, 4))
            context.append(token)
