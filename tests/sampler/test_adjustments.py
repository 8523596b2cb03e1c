"""Logit bias, min_tokens and penalties, with and without drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_kit import fixed_model, generate, hashed_model, judge, make_request, plain_distribution, plain_logits

from swapserve.request import Draft
from swapserve.sampler import Sampler
from swapserve.sampling.history import TokenCounts

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 1.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=3),
        "min_tokens": st.integers(0, 6),
    },
)


@settings(max_examples=120, deadline=None)
@given(params=PARAMS, prompt=st.lists(TOKENS, min_size=1, max_size=8), output=st.lists(TOKENS, max_size=6),
       draft=st.lists(TOKENS, max_size=3), stop_ids=st.lists(TOKENS, max_size=3))  # fmt: skip
def test_every_row_sees_the_tokens_before_it(params, prompt, output, draft, stop_ids) -> None:
    """H19: each row of a draft is judged by what would have been accepted so far, token by token."""
    model = hashed_model(VOCAB)
    request = make_request(prompt, output=output, draft=draft or None, stop_ids=stop_ids, temperature=1.0, **params)
    beside = make_request([5, 5], output=[5], temperature=0, name="beside")
    sampler = Sampler(VOCAB)
    verdict, other = judge(sampler, [request, beside], model, wants_probs=True)
    assert other.tokens == [int(model((5, 5)).argmax())] and other.probs is None
    for depth, row in enumerate(verdict.probs):
        so_far = [*output, *draft[:depth]]
        changed = plain_logits(model((*prompt, *so_far)).tolist(), request, so_far)
        torch.testing.assert_close(row, torch.tensor(plain_distribution(changed, request.params)), atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 99))
def test_greedy_output_is_the_plain_one_with_any_draft(params, seed) -> None:
    """H18, H19: greedy tokens under penalties and masks equal a plain loop's, with and without drafts."""
    model, prompt, expected = hashed_model(VOCAB), (1, seed % VOCAB), []
    params = {**params, "temperature": 0}
    request = make_request(prompt, stop_ids=[3], **params)
    for _ in range(20):
        changed = plain_logits(model((*prompt, *expected)).tolist(), request, expected)
        expected.append(max(range(VOCAB), key=lambda token: (changed[token], -token)))
    request.stop_ids, generator = frozenset([3]), torch.Generator().manual_seed(seed)

    def draft(request):
        done = request.num_output_tokens
        guess = expected[done : done + 3]
        return [t if torch.rand(1, generator=generator) < 0.8 else (t + 1) % VOCAB for t in guess]

    if 3 in expected[params.get("min_tokens", 0) :]:
        expected = expected[: expected.index(3, params.get("min_tokens", 0)) + 1]
    sampler = Sampler(VOCAB)
    assert generate(sampler, make_request(prompt, stop_ids=[3], **params), model, 20) == expected
    sampler.forget(request)
    assert generate(sampler, request, model, 20, draft) == expected


@pytest.mark.parametrize("with_draft", [False, True], ids=["plain", "drafted"])
def test_min_tokens_forbids_every_end_token(with_draft: bool) -> None:
    """H51: neither end token before the fifth token, then the likelier one, also where a draft proposes them."""
    model = fixed_model(0.0, 1.0, 8.0, 2.0, 0.0, 0.0, 0.0, 9.0)
    request = make_request(stop_ids=[2, 7], min_tokens=5, temperature=0)
    draft = (lambda request: [3, 7, 2]) if with_draft else (lambda request: None)
    assert generate(Sampler(8), request, model, 9, draft) == [3, 3, 3, 3, 3, 7]
    assert request.finish_reason == "stop"


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    """H49: they see the output only; repetition sees the prompt too."""
    model = fixed_model(2.0, 1.0, 0.5, -1.0)

    def probs(output=(), **params):
        (verdict,) = judge(Sampler(4), [make_request([0] * 4, output=output, **params)], model, wants_probs=True)
        return verdict.probs[0]

    def soft(*values):
        return torch.softmax(torch.tensor(values), 0)

    torch.testing.assert_close(probs(presence_penalty=2), soft(2.0, 1.0, 0.5, -1.0))
    torch.testing.assert_close(probs(frequency_penalty=1), soft(2.0, 1.0, 0.5, -1.0))
    torch.testing.assert_close(probs(repetition_penalty=1.5), soft(2.0 / 1.5, 1.0, 0.5, -1.0))
    torch.testing.assert_close(probs([1, 1], presence_penalty=2), soft(2.0, -1.0, 0.5, -1.0))
    torch.testing.assert_close(probs([1, 1], frequency_penalty=1), soft(2.0, -1.0, 0.5, -1.0))
    torch.testing.assert_close(probs([3], repetition_penalty=1.5), soft(2.0 / 1.5, 1.0, 0.5, -1.5))


@settings(max_examples=100, deadline=None)
@given(prompt=st.lists(TOKENS, max_size=5), outputs=st.lists(st.lists(TOKENS, max_size=9), max_size=5))
def test_counts_follow_any_change_of_the_output(prompt, outputs) -> None:
    """Also one that is no extension: a draft model's request takes tokens back."""
    counts = TokenCounts(prompt)
    for output in outputs:
        counts.follow(list(output))
        ids, numbers = counts.snapshot()
        found = dict(zip(ids.tolist(), numbers.tolist(), strict=True))
        assert found == {token: output.count(token) for token in {*prompt, *output}}


def test_counts_grow_past_their_first_size() -> None:
    counts = TokenCounts(range(10))
    counts.follow(list(range(500)))
    ids, numbers = counts.snapshot()
    assert sorted(ids.tolist()) == list(range(500)) and set(numbers.tolist()) == {1.0}


def test_a_draft_leaves_no_trace_in_the_counts() -> None:
    """H19: tokens of a rejected draft are not penalised in the next step."""
    model, sampler = fixed_model(3.0, 2.5, 0.0, 0.0), Sampler(4)
    request = make_request(output=[3], draft=Draft((1, 1)), temperature=0, frequency_penalty=1.0)
    (verdict,) = judge(sampler, [request], model)
    assert verdict.tokens == [0]
    request.accept(verdict.tokens)
    (verdict,) = judge(sampler, [request], model)
    assert verdict.tokens == [1]  # 2.5 against 3 - 1: had the draft been counted, 0 again


def test_an_id_used_again_starts_afresh() -> None:
    model, sampler = fixed_model(3.0, 2.5), Sampler(2)
    (first,) = judge(sampler, [make_request([1], name="same", temperature=0, repetition_penalty=2.0)], model)
    (second,) = judge(sampler, [make_request([0], name="same", temperature=0, repetition_penalty=2.0)], model)
    assert (first.tokens, second.tokens) == ([0], [1])
