"""A model whose logits are a plain function of the context, and a slow definition of what the sampler computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from swapserve.batch import Batch, Slice, Verdict, Work
from swapserve.params import SamplingParams
from swapserve.request import Draft, Request
from swapserve.sampler import Sampler, plan_rows

Model = Callable[[tuple[int, ...]], torch.Tensor]
"""Logits `[vocab]` of the token after a context."""


def hashed_model(vocab_size: int, spread: float = 2.0) -> Model:
    """Different logits for each context of two tokens, the same every time."""

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(context[-2:]) % 2**31)
        return torch.randn(vocab_size, generator=generator) * spread

    return logits


def fixed_model(*values: float) -> Model:
    """The same logits whatever the context."""
    return lambda context: torch.tensor(values)


def make_request(
    prompt: Sequence[int] = (1, 2, 3),
    name: str = "r",
    output: Sequence[int] = (),
    draft: Draft | Sequence[int] | None = None,
    key: int | None = None,
    stop_ids: Sequence[int] = (),
    **params: object,
) -> Request:
    """A request as the engine would submit it; `key` is the engine's seed where the client gave none."""
    asked = SamplingParams(**{"max_tokens": None, **params})
    seed = asked.seed if asked.seed is not None else key or 0
    request = Request(name, tuple(prompt), asked, max_len=100_000, stop_ids=frozenset(stop_ids), seed=seed)
    request.tokens += output
    request.computed = len(request.tokens) - 1 if output else 0
    request.draft = draft if isinstance(draft, Draft) or draft is None else Draft(tuple(draft))
    return request


def pending(request: Request) -> Slice:
    """The slice of all that a request has pending."""
    return Slice(request, request.computed, request.pending)


def judge(
    sampler: Sampler, slices: Sequence[Slice | Request], models: Model | Sequence[Model], wants_probs: bool = False
) -> list[Verdict]:
    """One step: the sampler's verdicts on slices (or all that requests have pending) of a model, or of one each."""
    pieces = [piece if isinstance(piece, Slice) else pending(piece) for piece in slices]
    works, packed = [], []
    for i, piece in enumerate(pieces):
        sequence = (*piece.request.tokens, *(piece.request.draft.tokens if piece.request.draft else ()))
        works.append(Work(piece, sequence[piece.start : piece.end], [0]))
        model = models if callable(models) else models[i]
        packed += [(model, sequence[: position + 1]) for position in range(piece.start, piece.end)]
    batch = Batch(works, 16, wants_probs)
    rows = plan_rows(batch)

    def logits(begin: int, end: int) -> torch.Tensor:
        with torch.inference_mode():  # as an executor does: such logits may be written to only in this mode
            return torch.stack([packed[i][0](packed[i][1]) for i in rows.index[begin:end]]).float()

    return sampler.judge(batch, rows, logits)


def generate(
    sampler: Sampler,
    request: Request,
    model: Model,
    num_tokens: int,
    draft: Callable[[Request], Draft | Sequence[int] | None] = lambda request: None,
) -> list[int]:
    """The first tokens of a request's output, with drafts from `draft`."""
    while request.num_output_tokens < num_tokens and not request.finished:
        proposal = draft(request) if request.num_output_tokens else None
        request.draft = proposal if isinstance(proposal, Draft) or not proposal else Draft(tuple(proposal))
        (verdict,) = judge(sampler, [request], model)
        assert verdict.error is None
        request.accept(verdict.tokens)
    return list(request.output)[:num_tokens]


def plain_logits(logits: Sequence[float], request: Request, output: Sequence[int]) -> list[float]:
    """Logits after bias, the min_tokens mask and penalties, one token at a time."""
    params, changed = request.params, list(logits)
    for token in range(len(changed)):
        changed[token] += params.logit_bias.get(token, 0.0)
        if token in request.stop_ids and len(output) < params.min_tokens:
            changed[token] = -math.inf
        if token in output or token in request.prompt:
            factor = params.repetition_penalty
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        changed[token] -= params.frequency_penalty * list(output).count(token)
        changed[token] -= params.presence_penalty * (token in output)
    return changed


def plain_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min_p, top_k and top_p, by sorting everything."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / params.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if weights[token] >= params.min_p]
    if 0 < params.top_k < len(kept):
        kept = [token for token in kept if logits[token] >= logits[kept[params.top_k - 1]]]
    if params.top_p < 1:
        total, mass, nucleus = math.fsum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if mass >= params.top_p * total:
                break
            nucleus.append(token)
            mass += weights[token]
        kept = nucleus
    total, probs = math.fsum(weights[token] for token in kept), [0.0] * len(logits)
    for token in kept:
        probs[token] = weights[token] / total
    return probs


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of Pearson's test that counts `observed` came from the probabilities `expected`.

    Cells expected fewer than five times are put together.
    """
    wanted = expected.double() / expected.sum() * observed.sum()
    rare = wanted < 5
    assert observed[wanted == 0].sum() == 0
    counts = torch.cat([observed[~rare].double(), observed[rare].sum().double().reshape(1)])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum().reshape(1)])
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))
