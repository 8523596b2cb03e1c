"""From logits to tokens: one verdict for each slice of a batch.

Every row that yields a token is judged by itself, as if the draft tokens before it had been accepted: that gives one
*emitted* token a row. A work's answer is its rows' emitted tokens up to the first that differs from the draft.

What happens to a row, in vLLM's order: raw log-probabilities are taken; `logit_bias` is added; stop tokens are
forbidden while the output is shorter than `min_tokens`; penalties (repetition, then frequency and presence) are
applied. A greedy row then yields its largest logit, the lowest id of equal ones. Another is divided by the
temperature, cut down by min_p, top_k and top_p, and a token is drawn from what is left.

A draft is verified exactly. Greedy, and for tokens that were proposed with certainty: the row's own token, drawn with
the request's own random number for that position, is emitted, and the draft accepted if it is the same; the output is
the one without a draft, token for token. For tokens that come with probabilities: by rejection sampling (see
`swapserve.sampling.verification`), which accepts more, and gives the same distribution though not the same tokens.
A request whose client gave a seed was promised the same tokens every time, so it is always verified the first way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swapserve.batch import Batch, Verdict, Work
from swapserve.request import Request, TokenLogprobs
from swapserve.sampling.adjust import Adjustments
from swapserve.sampling.history import Profile
from swapserve.sampling.logprobs import token_logprobs
from swapserve.sampling.randomness import Stream, uniforms
from swapserve.sampling.rows import RowPlan, Span, plan_rows
from swapserve.sampling.tasks import Tasks, TokenRow, gather_tasks
from swapserve.sampling.truncation import truncate
from swapserve.sampling.verification import verify
from swapserve.sampling.wide import NOT_A_NUMBER, chosen_rows, chunk_maxima, chunk_width, draw, first_argmax

__all__ = ["RowPlan", "Sampler", "plan_rows"]

BLOCK_BYTES = 32 << 20
"""The most logits asked for at once: 32 rows of a vocabulary of 262,144."""
NONE_ALLOWED = -2
"""Stands for the token of a row whose tokens are all forbidden."""
_ERRORS = {
    NOT_A_NUMBER: "The model's logits for this request hold a NaN or an infinity, so that no token can be chosen.",
    NONE_ALLOWED: "Every token is forbidden at this position: min_tokens and the stop tokens leave none to choose.",
}


@dataclass(slots=True)
class _Outcome:
    """What was found so far, by row: emitted tokens block by block, log-probabilities, and distributions `[vocab]`."""

    emitted: list[Tensor] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    probs: dict[int, Tensor] = field(default_factory=dict)


class Sampler:
    """Chooses tokens from logits, and verifies drafts against them.

    `vocab_size` is the width of the logits; `device` is where they are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._width = chunk_width(vocab_size)
        self._block_rows = max(1, BLOCK_BYTES // (4 * vocab_size))
        self._profiles: dict[str, Profile] = {}

    def judge(self, batch: Batch, rows: RowPlan, logits: Callable[[int, int], Tensor]) -> list[Verdict]:
        """Choose the tokens of a batch: one verdict a work, in order.

        `rows` is `plan_rows(batch)`; `logits(a, b)` computes the float32 logits `[b - a, vocab]` of rows a to b - 1.
        It is called once for each block of rows, in order, and its answer may be written to.
        Raises ValueError for a draft whose probabilities do not fit the vocabulary.
        """
        outcome = _Outcome()
        with torch.inference_mode():  # logits made under it may be written to only under it
            tasks = gather_tasks(batch, rows, self._profiles, self.vocab_size)
            for begin in range(0, len(rows), self._block_rows):
                end = min(len(rows), begin + self._block_rows)
                self._judge_block(begin, logits(begin, end), tasks.between(begin, end), batch.wants_probs, outcome)
        emitted: list[int] = torch.cat(outcome.emitted).tolist() if outcome.emitted else []
        return [_verdict(work, span, emitted, outcome) for work, span in zip(batch.works, rows.spans, strict=True)]

    def forget(self, request: Request) -> None:
        """The request is finished or aborted: drop what is kept for it. Harmless for one never seen."""
        self._profiles.pop(request.id, None)

    def _judge_block(self, begin: int, block: Tensor, tasks: Tasks, wants_probs: bool, outcome: _Outcome) -> None:
        """Judge the rows from `begin` on, whose logits are `block` `[n, vocab]`."""
        scored = tasks.scored_rows()
        raw = None
        if scored:  # before anything changes them
            raw = chosen_rows(block, [task.row - begin for task in scored])
            raw = raw.clone() if raw is block and tasks.token_rows else raw
        if tasks.token_rows:
            adjustments = Adjustments()
            for task in tasks.token_rows:
                task.adjust(adjustments, task.row - begin)
            adjustments.apply(block)
        maxima = chunk_maxima(block, self._width)
        peak = maxima.amax(-1)
        emitted = first_argmax(block, maxima, self._width)
        sampled = [task for task in tasks.token_rows if not task.profile.greedy]
        for group in (
            [task for task in sampled if not task.profile.truncates],
            [task for task in sampled if task.profile.truncates],
        ):
            if group:
                index = [task.row - begin for task in group]
                emitted[index] = self._sample(block, maxima, index, group, wants_probs, outcome)
        emitted = torch.where(peak.isfinite(), emitted, torch.where(peak == -torch.inf, NONE_ALLOWED, NOT_A_NUMBER))
        outcome.emitted.append(emitted)
        if raw is not None:
            prompt = torch.tensor([task.token for task in scored], device=raw.device)
            tokens = torch.where(prompt < 0, emitted[[task.row - begin for task in scored]].clamp(min=0), prompt)
            scores = token_logprobs(raw, tokens, [task.num_top for task in scored], self._width)
            outcome.logprobs.update((task.row, score) for task, score in zip(scored, scores, strict=True))

    def _sample(
        self,
        block: Tensor,
        maxima: Tensor,
        index: list[int],
        group: list[TokenRow],
        wants_probs: bool,
        outcome: _Outcome,
    ) -> Tensor:
        """The tokens of rows that are drawn, `[len(group)]`: all of them truncate, or none does."""
        logits, uniform = chosen_rows(block, index), self._uniforms(group, Stream.DRAW)
        verified = [i for i, task in enumerate(group) if task.proposed is not None]
        probs = None
        if group[0].profile.truncates:
            profiles = [task.profile for task in group]
            candidates = truncate(logits, chosen_rows(maxima, index), profiles, self._width)
            tokens = candidates.draw(uniform)
            if wants_probs or verified:
                probs = candidates.dense(self.vocab_size)
        else:
            temperature = torch.tensor([[task.profile.params.temperature] for task in group], device=block.device)
            probs = torch.softmax(logits.div_(temperature), dim=-1)
            tokens = draw(probs, uniform, self._width)
        if probs is not None and verified:
            tokens[verified] = self._verify(probs[verified], [group[i] for i in verified])
        if probs is not None and wants_probs:
            outcome.probs.update((task.row, row) for task, row in zip(group, probs, strict=True))
        return tokens

    def _verify(self, target: Tensor, tasks: list[TokenRow]) -> Tensor:
        """Accept or replace draft tokens that came with probabilities."""
        return verify(
            target,
            torch.stack([task.proposed for task in tasks if task.proposed is not None]).to(target.device),
            torch.tensor([task.draft_token for task in tasks], device=target.device),
            self._uniforms(tasks, Stream.ACCEPT),
            self._uniforms(tasks, Stream.RESIDUAL),
            self._width,
        )

    def _uniforms(self, tasks: list[TokenRow], stream: Stream) -> Tensor:
        """Each row's random number of one stream, float64 `[len(tasks)]`."""
        seeds = [task.profile.request.seed for task in tasks]
        return torch.from_numpy(uniforms(seeds, [task.position for task in tasks], stream)).to(self.device)


def _verdict(work: Work, span: Span, emitted: list[int], outcome: _Outcome) -> Verdict:
    """A work's answer: its rows' emitted tokens up to the first that differs from its draft."""
    request, first = work.slice.request, span.first_judged
    prompt_rows = range(span.first, first)
    for row in prompt_rows:
        if emitted[row] < 0:
            return Verdict(error=_ERRORS[emitted[row]])
    prompt_logprobs = [outcome.logprobs[row] for row in prompt_rows] if span.num_prompt else None
    if not span.num_judged:
        return Verdict(prompt_logprobs=prompt_logprobs)
    num_draft = span.num_judged - 1
    draft = request.draft.tokens if num_draft and request.draft else ()
    num_accepted = 0
    while num_accepted < num_draft and emitted[first + num_accepted] == draft[num_accepted]:
        num_accepted += 1
    end = first + num_accepted + 1
    tokens = emitted[first:end]
    if tokens[-1] < 0:
        return Verdict(error=_ERRORS[tokens[-1]])
    logprobs = [outcome.logprobs[row] for row in range(first, end)] if request.params.logprobs is not None else None
    probs = torch.stack([outcome.probs[row] for row in range(first, end)]) if first in outcome.probs else None
    return Verdict(tokens, logprobs, prompt_logprobs, probs)
