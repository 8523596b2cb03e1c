"""Logits that are no numbers end one request with a sentence and leave the others alone."""

from __future__ import annotations

import math

import pytest
import torch
from sampler_kit import fixed_model, hashed_model, judge, make_request

from swapserve.request import Draft
from swapserve.sampler import Sampler

VOCAB = 48
KINDS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1, "logprobs": 3},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
]


def broken_row(value: float, everywhere: bool) -> torch.Tensor:
    row = hashed_model(VOCAB)((7, 7))
    row[slice(None) if everywhere else 17] = value
    return row


@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_broken_row_ends_its_request_only(kind: dict[str, float], value: float, everywhere: bool) -> None:
    """H50: request 2 of 4 has a NaN (or an infinity) in its row; of any kind, beside any kind."""
    model = hashed_model(VOCAB)
    for neighbours in KINDS:
        requests = [make_request([1, i], name=str(i), key=i, **(kind if i == 1 else neighbours)) for i in range(4)]
        expected = [judge(Sampler(VOCAB), [request], model)[0].tokens for request in requests]
        models = [model, lambda context: broken_row(value, everywhere), model, model]
        verdicts = judge(Sampler(VOCAB), requests, models, wants_probs=True)
        assert "NaN or an infinity" in verdicts[1].error
        assert not verdicts[1].tokens and verdicts[1].logprobs is None and verdicts[1].probs is None
        for i in (0, 2, 3):
            assert verdicts[i].tokens == expected[i] and verdicts[i].error is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_logit_is_seen_under_a_mask(value: float) -> None:
    """H50: also where the only broken logit is of a token that is forbidden or biased."""
    model = fixed_model(0.0, value, 1.0)
    for kind in ({"min_tokens": 3}, {"logit_bias": {1: -100.0}}, {"repetition_penalty": 2.0}):
        (verdict,) = judge(Sampler(3), [make_request([1], temperature=0, stop_ids=[1], **kind)], model)
        assert "NaN or an infinity" in verdict.error


def test_a_broken_prompt_row_ends_its_request() -> None:
    model = hashed_model(VOCAB)
    broken = make_request([5, 6, 7], prompt_logprobs=1, temperature=0)
    other = make_request([5, 6, 7], name="other", prompt_logprobs=1, temperature=0)
    models = [lambda context: broken_row(math.nan, False) if len(context) == 2 else model(context), model]
    first, second = judge(Sampler(VOCAB), [broken, other], models)
    assert "NaN or an infinity" in first.error and not first.tokens
    assert second.error is None and len(second.prompt_logprobs) == 2 and len(second.tokens) == 1


def test_every_token_forbidden() -> None:
    request = make_request(stop_ids=range(4), min_tokens=1)
    beside = make_request(name="beside", stop_ids=range(4))
    first, second = judge(Sampler(4), [request, beside], fixed_model(1.0, 2.0, 3.0, 4.0))
    assert "forbidden" in first.error and not first.tokens
    assert second.error is None and len(second.tokens) == 1


@pytest.mark.parametrize("kind", [{"temperature": 0}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_broken_row_after_a_rejected_draft_token_does_not_count(kind: dict[str, float]) -> None:
    """H50: without the draft it would not have been computed; once the draft is accepted it is reached."""
    model = hashed_model(VOCAB)
    (verdict,) = judge(Sampler(VOCAB), [make_request(key=1, **kind)], model)
    right = verdict.tokens[0]
    for guess, fails in ((right, True), ((right + 1) % VOCAB, False)):
        request = make_request(key=1, draft=[guess], **kind)
        models = lambda context: model(context) if len(context) == 3 else broken_row(math.nan, True)  # noqa: E731
        (verdict,) = judge(Sampler(VOCAB), [request], models)
        assert (verdict.error is not None) == fails
        assert list(verdict.tokens) == ([] if fails else [right])


def test_a_broken_row_with_a_draft_that_has_probabilities() -> None:
    draft = Draft((1, 2), torch.full((2, VOCAB), 1 / VOCAB))
    request = make_request(draft=draft, key=1, top_k=9)
    (verdict,) = judge(Sampler(VOCAB), [request], lambda context: broken_row(math.nan, True))
    assert "NaN or an infinity" in verdict.error


def test_temperatures_too_low_to_divide_by_are_greedy() -> None:
    for temperature in (1e-300, 1e-45, 1e-6, 2e-5):
        (verdict,) = judge(Sampler(4), [make_request(temperature=temperature)], fixed_model(3e4, 0.0, 4e4, -9e4))
        assert verdict.tokens == [2]


def test_forget_is_harmless_and_drops_what_is_kept() -> None:
    sampler, request = Sampler(4), make_request()
    sampler.forget(request)
    judge(sampler, [request], fixed_model(0.0, 1.0, 2.0, 3.0))
    assert sampler._profiles
    sampler.forget(request)
    assert not sampler._profiles
