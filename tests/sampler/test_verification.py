"""Drafts change how fast tokens come and not which, or not how they are distributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sampler_kit import Model, chi_square, generate, hashed_model, judge, make_request, plain_distribution

from swapserve.request import Draft, Request
from swapserve.sampler import Sampler
from swapserve.sampling import verification

VOCAB = 10
KINDS = [{}, {"top_k": 4}, {"top_p": 0.85}, {"temperature": 0.8, "min_p": 0.05}]
NUM_REQUESTS = 2500


def test_a_draft_of_one_token_can_be_rejected() -> None:
    """H17: the first draft token is verified like every other."""
    model = hashed_model(VOCAB)
    right = int(model((1, 1)).argmax())
    for guess in range(VOCAB):
        (verdict,) = judge(Sampler(VOCAB), [make_request([1, 1, 1], draft=[guess], temperature=0)], model)
        assert len(verdict.tokens) == (2 if guess == right else 1)
        assert verdict.tokens[0] == right


@pytest.mark.parametrize("kind", [{"temperature": 0}, *[{"seed": 9, **kind} for kind in KINDS]], ids=str)
@pytest.mark.parametrize("with_probs", [False, True], ids=["certain", "probs"])
def test_tokens_are_those_without_a_draft(kind: dict[str, float], with_probs: bool) -> None:
    """H18: greedy and seeded output is the same with drafts of any quality, token for token."""
    model = hashed_model(VOCAB)
    expected = generate(Sampler(VOCAB), make_request(**kind), model, 500)
    generator, accepted = torch.Generator().manual_seed(0), []

    def draft(request: Request) -> Draft:
        done = request.num_output_tokens
        tokens = [(t if torch.rand(1, generator=generator) < 0.7 else 3) for t in expected[done : done + 3]]
        return Draft(tuple(tokens), torch.full((len(tokens), VOCAB), 1 / VOCAB) if with_probs else None)

    class Counting(Sampler):
        def judge(self, *args: object) -> object:
            verdicts = super().judge(*args)  # type: ignore[arg-type]
            accepted.append(len(verdicts[0].tokens) - 1)
            return verdicts

    assert generate(Counting(VOCAB), make_request(**kind), model, 500, draft) == expected
    assert {0, 1, 2, 3} == set(accepted)


def draft_model(model: Model, quality: float) -> Callable[[Request, bool], Draft]:
    """Drafts of length 3 drawn from the target's logits, mixed with noise: 1 is the target, 0 has nothing of it."""
    generator, noise, rows = torch.Generator().manual_seed(11), hashed_model(VOCAB), {}

    def propose(request: Request, with_probs: bool) -> Draft:
        context, tokens, probs = tuple(request.tokens), [], []
        for _ in range(3):
            if context[-2:] not in rows:
                mixed = quality * model(context) + (1 - quality) * noise((*context[-2:], context[-2]))
                rows[context[-2:]] = torch.softmax(mixed, 0)
            row = rows[context[-2:]]
            token = int(torch.multinomial(row, 1, generator=generator))
            tokens.append(token)
            probs.append(row)
            context = (*context, token)
        return Draft(tuple(tokens), torch.stack(probs) if with_probs else None)

    return propose


def drafted_outputs(
    model: Model, kind: dict[str, float], quality: float, with_probs: bool
) -> tuple[torch.Tensor, float]:
    """The first three tokens of many requests with drafts `[n, 3]`, and the mean number accepted of a draft."""
    propose = draft_model(model, quality)
    sampler = Sampler(VOCAB)
    requests = [make_request([4, 4], name=str(i), key=10_000 + i, **kind) for i in range(NUM_REQUESTS)]
    unfinished, accepted, drafts = requests, 0, 0
    while unfinished:
        for request in unfinished:
            request.draft = propose(request, with_probs)
        for request, verdict in zip(unfinished, judge(sampler, unfinished, model), strict=True):
            accepted, drafts = accepted + len(verdict.tokens) - 1, drafts + 1
            request.accept(verdict.tokens)
        unfinished = [request for request in unfinished if request.num_output_tokens < 3]
    return torch.tensor([list(request.output)[:3] for request in requests]), accepted / drafts


def joint_distribution(model: Model, kind: dict[str, float]) -> torch.Tensor:
    """The exact probabilities of the first three tokens, `[vocab, vocab, vocab]`."""
    params = make_request(**kind).params

    def row(*context: int) -> torch.Tensor:
        return torch.tensor(plain_distribution(model(context).tolist(), params), dtype=torch.float64)

    pairs = row(4, 4)[:, None] * torch.stack([row(4, a) for a in range(VOCAB)])
    third = torch.stack([torch.stack([row(a, b) for b in range(VOCAB)]) for a in range(VOCAB)])
    return pairs[:, :, None] * third


def p_values(outputs: torch.Tensor, joint: torch.Tensor) -> list[float]:
    """Of the first token, of the first two together, and of the second and third together."""
    first, second, third = outputs.unbind(1)
    return [
        chi_square(torch.bincount(first, minlength=VOCAB), joint.sum((1, 2))),
        chi_square(torch.bincount(first * VOCAB + second, minlength=VOCAB**2), joint.sum(2).flatten()),
        chi_square(torch.bincount(second * VOCAB + third, minlength=VOCAB**2), joint.sum(0).flatten()),
    ]


@pytest.fixture(scope="module")
def model() -> Model:
    """A hashed model whose rows are computed once."""
    plain, rows = hashed_model(VOCAB, 1.0), {}
    return lambda context: rows[key] if (key := context[-2:]) in rows else rows.setdefault(key, plain(key))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("with_probs, quality", [(False, 0.6), (True, 0.0), (True, 0.6), (True, 1.0)])
def test_drafts_do_not_change_the_distribution(model, kind, with_probs: bool, quality: float) -> None:
    outputs, accepted = drafted_outputs(model, kind, quality, with_probs)
    assert min(p_values(outputs, joint_distribution(model, kind))) > 1e-3
    if with_probs and quality == 1.0 and not kind:
        assert accepted == 3.0  # the draft's distribution is the target's: everything is accepted
    assert accepted > 0.1


def test_the_test_above_sees_a_wrong_residual(model, monkeypatch) -> None:
    """Replacing a rejected token by a draw from the target itself is wrong, and shows."""
    monkeypatch.setattr(verification, "residual", lambda target, proposed: target)
    outputs, _ = drafted_outputs(model, {}, 0.6, True)
    assert min(p_values(outputs, joint_distribution(model, {}))) < 1e-6


def test_probabilities_accept_more_than_certainty(model) -> None:
    """What rejection sampling is for."""
    assert drafted_outputs(model, {}, 0.6, True)[1] > 1.3 * drafted_outputs(model, {}, 0.6, False)[1]


def test_the_residual_is_what_the_proposal_leaves() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    proposed = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]])
    expected = torch.tensor([[0.4, 0.0, 0.0], [0.2, 0.3, 0.5]])
    torch.testing.assert_close(verification.residual(target, proposed), expected)


def test_acceptance_is_certain_or_impossible_at_the_ends() -> None:
    target, proposed = torch.tensor([[0.0, 0.75, 0.25]]), torch.tensor([[0.5, 0.5, 0.0]])
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for token, accepted in ((0, False), (1, True)):
        for uniform in ends.split(1):
            emitted = verification.verify(target, proposed, torch.tensor([token]), uniform, ends[:1], 3)
            assert (int(emitted) == token) == accepted


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_a_draft_model_may_share_the_sampler_and_the_seed(model, kind) -> None:
    """Its draws use the very numbers that the target's do; what is emitted is still distributed as the target."""
    small = hashed_model(VOCAB, 0.7)
    mix = lambda context: 0.6 * model(context) + small((*context[-2:], context[-1]))  # noqa: E731
    target, drafting = Sampler(VOCAB), Sampler(VOCAB)
    requests = [make_request([4, 4], name=str(i), key=i, **kind) for i in range(NUM_REQUESTS)]
    unfinished, accepted = requests, 0
    while unfinished:
        twins = [
            make_request((4, 4), request.id, list(request.output), key=request.seed, **kind) for request in unfinished
        ]
        probs: list[list[torch.Tensor]] = [[] for _ in twins]
        for _ in range(2):
            for twin, rows, verdict in zip(twins, probs, judge(drafting, twins, mix, wants_probs=True), strict=True):
                twin.accept(verdict.tokens)
                rows.append(verdict.probs[0])
        for request, twin, rows in zip(unfinished, twins, probs, strict=True):
            request.draft = Draft(tuple(twin.output[request.num_output_tokens :]), torch.stack(rows))
        for request, verdict in zip(unfinished, judge(target, unfinished, model), strict=True):
            accepted += len(verdict.tokens) - 1
            request.accept(verdict.tokens)
        unfinished = [request for request in unfinished if request.num_output_tokens < 3]
    assert accepted > NUM_REQUESTS / 2
    outputs = torch.tensor([list(request.output)[:3] for request in requests])
    assert min(p_values(outputs, joint_distribution(model, kind))) > 1e-3


def test_a_token_the_target_cannot_give_is_rejected() -> None:
    model = lambda context: torch.tensor([0.0, 5.0, 1.0])  # noqa: E731
    for key in range(50):
        draft = Draft((0,), torch.tensor([[0.98, 0.01, 0.01]]))
        (verdict,) = judge(Sampler(3), [make_request(draft=draft, key=key, top_k=2)], model)
        assert len(verdict.tokens) == 1 and verdict.tokens[0] in (1, 2)


def test_probs_are_of_the_tokens_returned(model) -> None:
    request = make_request(draft=Draft((1, 2, 3), torch.full((3, VOCAB), 1 / VOCAB)), key=3)
    beside = make_request(name="greedy", temperature=0)
    verdict, greedy = judge(Sampler(VOCAB), [request, beside], model, wants_probs=True)
    assert verdict.probs.shape == (len(verdict.tokens), VOCAB) and greedy.probs is None
    context = list(request.prompt)
    for token, row in zip(verdict.tokens, verdict.probs, strict=True):
        torch.testing.assert_close(row, torch.softmax(model(tuple(context)), 0))
        context.append(token)
    assert judge(Sampler(VOCAB), [request], model)[0].probs is None


def test_probabilities_over_another_vocabulary_are_refused(model) -> None:
    request = make_request(name="odd", draft=Draft((1,), torch.full((1, 8), 1 / 8)))
    with pytest.raises(ValueError, match=r"'odd' has probabilities of shape \[1, 8\]; they must be \[1, 10\]"):
        judge(Sampler(VOCAB), [request], model)
