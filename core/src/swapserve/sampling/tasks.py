"""What has to be done for the rows of a batch, beyond finding their likeliest token."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from swapserve.batch import Batch
from swapserve.request import Draft, Request
from swapserve.sampling.adjust import Adjustments
from swapserve.sampling.history import Profile
from swapserve.sampling.rows import RowPlan, Span


@dataclass(slots=True)
class ScoredRow:
    """A row whose logits say how likely a token was: a prompt token, or (-1) the one this row emits."""

    row: int
    token: int
    num_top: int


@dataclass(slots=True)
class TokenRow:
    """A row that yields a token and asks for more than the likeliest one.

    position: the token's absolute position. num_output: the output before it, drafts included.
    draft_token, proposed: the draft's token for this position and the distribution `[vocab]` it is to be verified
    against; None where there is none.
    seen: the distinct tokens before it and their counts in the output, where penalties need them.
    """

    row: int
    profile: Profile
    position: int
    num_output: int
    draft_token: int | None = None
    proposed: torch.Tensor | None = None
    seen: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None

    def adjust(self, adjustments: Adjustments, row: int) -> None:
        """Note what changes this row's logits, at `row` of its block."""
        profile = self.profile
        if len(profile.bias_ids):
            adjustments.add(row, profile.bias_ids, profile.bias)
        if len(profile.stop_ids) and self.num_output < profile.params.min_tokens:
            adjustments.forbid(row, profile.stop_ids)
        if self.seen is not None and len(self.seen[0]):
            adjustments.penalise(row, *self.seen, profile.params)


@dataclass(slots=True)
class Tasks:
    """The rows of a batch that ask for something, each kind in order of row."""

    prompt_rows: list[ScoredRow] = field(default_factory=list)
    token_rows: list[TokenRow] = field(default_factory=list)

    def between(self, begin: int, end: int) -> Tasks:
        """Those of the rows begin to end - 1."""
        return Tasks(_between(self.prompt_rows, begin, end), _between(self.token_rows, begin, end))

    def scored_rows(self) -> list[ScoredRow]:
        """The rows that want log-probabilities, in order of row."""
        emitting = [
            ScoredRow(task.row, -1, task.profile.params.logprobs)
            for task in self.token_rows
            if task.profile.params.logprobs is not None
        ]
        return sorted([*self.prompt_rows, *emitting], key=attrgetter("row")) if emitting else self.prompt_rows


_Row = TypeVar("_Row", ScoredRow, TokenRow)


def _between(rows: list[_Row], begin: int, end: int) -> list[_Row]:
    by_row = attrgetter("row")
    return rows[bisect_left(rows, begin, key=by_row) : bisect_left(rows, end, key=by_row)]


def gather_tasks(batch: Batch, rows: RowPlan, profiles: dict[str, Profile], vocab_size: int) -> Tasks:
    """The tasks of a batch. `profiles`, by request id, is added to for requests that are new."""
    tasks = Tasks()
    for work, span in zip(batch.works, rows.spans, strict=True):
        request = work.slice.request
        if span.num_prompt:
            tasks.prompt_rows.extend(_prompt_rows(request, work.slice.start, span))
        if span.num_judged:
            profile = profiles.get(request.id)
            if profile is None or profile.request is not request:
                profile = profiles[request.id] = Profile(request, vocab_size)
            if not profile.undemanding:
                tasks.token_rows.extend(_token_rows(profile, span, vocab_size))
    return tasks


def _prompt_rows(request: Request, start: int, span: Span) -> list[ScoredRow]:
    """The rows of one work that score prompt tokens; the first is for the first token that has no entry yet."""
    first_token = max(start, len(request.prompt_logprobs) - 1) + 1
    num_top = request.params.prompt_logprobs or 0
    return [ScoredRow(span.first + i, request.prompt[first_token + i], num_top) for i in range(span.num_prompt)]


def _token_rows(profile: Profile, span: Span, vocab_size: int) -> list[TokenRow]:
    """The rows of one work that yield tokens, each as if the draft tokens before it had been accepted."""
    request, counts = profile.request, profile.counts
    draft = request.draft if span.num_judged > 1 else None
    tokens = draft.tokens[: span.num_judged - 1] if draft else ()
    proposed = None
    if draft and draft.probs is not None and not profile.greedy and profile.params.seed is None:
        proposed = _checked(draft, tokens, vocab_size, request.id)
    if counts is not None:
        counts.follow(request.tokens[len(request.prompt) :])
    rows = []
    for depth in range(span.num_judged):
        rows.append(
            TokenRow(
                span.first_judged + depth,
                profile,
                len(request.tokens) + depth,
                request.num_output_tokens + depth,
                tokens[depth] if depth < len(tokens) else None,
                proposed[depth] if proposed is not None and depth < len(tokens) else None,
                counts.snapshot() if counts is not None else None,
            )
        )
        if counts is not None and depth < len(tokens):
            counts.push(tokens[depth])
    if counts is not None:
        for _ in tokens:  # `follow` would take them back too, at the price of looking for where they begin
            counts.pop()
    return rows


def _checked(draft: Draft, tokens: tuple[int, ...], vocab_size: int, request_id: str) -> torch.Tensor:
    """The draft's probabilities, which must be a distribution over this model's vocabulary for each token."""
    assert draft.probs is not None
    if tuple(draft.probs.shape) != (len(draft.tokens), vocab_size):
        raise ValueError(
            f"The draft for request {request_id!r} has probabilities of shape {list(draft.probs.shape)}; "
            f"they must be [{len(draft.tokens)}, {vocab_size}], one row a token over the model's whole vocabulary."
        )
    return draft.probs
