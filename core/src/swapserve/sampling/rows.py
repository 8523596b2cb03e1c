"""Which positions of a packed batch need logits, and what each of them is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from swapserve.batch import Batch


@dataclass(slots=True)
class Span:
    """The rows of one work: `num_prompt` that score prompt tokens, then `num_judged` that yield tokens.

    Row `first + num_prompt + j` predicts the token after `tokens + draft[:j]`.
    """

    first: int
    num_prompt: int
    num_judged: int

    @property
    def first_judged(self) -> int:
        return self.first + self.num_prompt

    @property
    def end(self) -> int:
        return self.first + self.num_prompt + self.num_judged


@dataclass(slots=True)
class RowPlan:
    """The rows that go through the language-model head, in order, and which work each belongs to.

    index: packed positions, the works' slices laid end to end; row `i` is the hidden state at `index[i]`.
    spans: one a work, in the batch's order.
    """

    index: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.index)


def plan_rows(batch: Batch) -> RowPlan:
    """Choose the positions of a batch whose logits are needed.

    A slice that samples needs the rows from its last verified token on: one, and one more a draft token.
    A request that still owes prompt log-probabilities also needs each row that predicts a prompt token it has
    no entry for, so that a prompt recomputed after a preemption gives no entry twice.
    """
    plan = RowPlan()
    index, spans = plan.index, plan.spans
    offset = 0  # of the work's first position, minus the position itself
    packed = 0
    for work in batch.works:
        piece = work.slice
        request, start, count = piece.request, piece.start, piece.count
        end = start + count
        offset = packed - start
        packed += count
        first = len(index)
        num_prompt = num_judged = 0
        if request.params.prompt_logprobs is not None and request.wants_prompt_logprobs:
            begin = max(start, len(request.prompt_logprobs) - 1)
            num_prompt = max(0, min(end, len(request.prompt) - 1) - begin)
            index.extend(range(begin + offset, begin + offset + num_prompt))
        newest = len(request.tokens) - 1
        if end > newest:
            num_judged = end - newest
            if num_judged == 1:
                index.append(newest + offset)
            else:
                index.extend(range(newest + offset, end + offset))
        spans.append(Span(first, num_prompt, num_judged))
    return plan
