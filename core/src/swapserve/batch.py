"""What the loop hands to the executor and what comes back: the seam below the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swapserve.request import Request, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from swapserve.plan import StepPlan
    from swapserve.policies import KVManager


@dataclass(slots=True)
class Slice:
    """Positions [start, start + count) of `request.tokens + request.draft`, computed in one step.

    What it says of the request holds until the step's tokens are accepted.
    """

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether it reaches the last verified token, so that the step yields at least one new token."""
        return self.end >= len(self.request.tokens)

    @property
    def num_draft(self) -> int:
        """How many of its positions are draft tokens: the last ones."""
        return max(0, self.end - len(self.request.tokens))


@dataclass(slots=True)
class Work:
    """One slice with the token ids it computes and the blocks it reads and writes.

    `table[p // block_size] * block_size + p % block_size` is the slot of position `p`.
    """

    slice: Slice
    token_ids: Sequence[int]
    table: Sequence[int]


@dataclass(slots=True)
class Batch:
    """Everything one step computes."""

    works: list[Work]
    block_size: int
    wants_probs: bool = False
    """Whether verdicts carry the distribution each token was drawn from (a draft model's answers do)."""

    @classmethod
    def from_plan(cls, plan: StepPlan, kv: KVManager) -> Batch:
        """The slices of a finished plan, each with its token ids and its block table."""
        works = []
        for piece in plan.slices.values():
            request, start, end = piece.request, piece.start, piece.end
            token_ids = request.tokens[start:end]
            if (num_draft := piece.num_draft) and request.draft:
                token_ids += request.draft.tokens[:num_draft]
            works.append(Work(piece, token_ids, kv.table(request)))
        return cls(works, kv.block_size)


@dataclass(slots=True)
class Verdict:
    """What the executor says of one slice.

    tokens: for a slice that samples, the draft tokens it accepted and then one of the model's own; else empty.
    logprobs: one a token, where the request asked for them.
    prompt_logprobs: for a request that asked, one for each prompt position p + 1 with p in the slice.
    probs: `[len(tokens), vocab]`, where the batch wants them and the request samples.
    error: why this request cannot go on (its logits were not a number, say); the others are unharmed.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    probs: torch.Tensor | None = None
    error: str | None = None


class Executor(Protocol):
    """Runs the model on a batch, samples, and verifies drafts."""

    def execute(self, batch: Batch) -> Sequence[Verdict]:
        """One verdict a work, in order. The KV of every position in the batch is stored when it returns."""

    def forget(self, request: Request) -> None:
        """The request is finished or aborted: drop what you keep for it. Harmless for one never seen."""
