"""Chunked prefill (Sarathi-Serve, Agrawal et al. 2024): decodes first, then pieces of prompts."""

from __future__ import annotations

from typing import final

from pydantic import Field

from swapserve import PolicyOptions, Request, Scheduler, StepPlan, hookimpl


@final
class Chunked(Scheduler):
    """Everyone who decodes gets on in every step; what is left of the chunk goes to prompts, oldest first.

    Drafts take only what leaves a token for everyone who runs and for the next newcomer, and no more requests run
    than the chunk has tokens: so each of them decodes, and the oldest prompt grows, in every step. A newcomer waits
    one step when its next block is being computed by another in this one.
    """

    name = "chunked"
    splits_prompts = True

    class Options(PolicyOptions):
        chunk_size: int | None = Field(None, ge=1, description="most tokens in a step; unset: max_num_batched_tokens")
        long_prefill_token_threshold: int = Field(
            0, ge=0, description="most tokens of one prompt in a step; 0: no limit but the chunk's"
        )

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.chunk_size = options.chunk_size
        self.longest_piece = options.long_prefill_token_threshold or None

    def schedule(self, plan: StepPlan) -> None:
        left = min(self.chunk_size or plan.tokens_left, plan.tokens_left)
        num_behind = len(plan.running) + bool(plan.waiting and plan.seats_left)
        for request in sorted(plan.running, key=_prefilling_last):
            num_behind -= 1
            left -= plan.make_room_for(request, at_most=self._piece(request, left, num_behind)).tokens
        for request in plan.waiting[: 2 * plan.limits.max_num_seqs]:
            if left and plan.seats_left and plan.soon_cached(request):
                continue
            grant = plan.include(request, at_most=self._piece(request, left))
            if not grant:
                break
            left -= grant.tokens

    def _piece(self, request: Request, left: int, num_behind: int = 0) -> int:
        """How many of the chunk's last `left` tokens a request may take, with so many still to be served after it."""
        if request.prefilling:
            return min(left, self.longest_piece or left)
        return max(min(left, 1), left - num_behind)


def _prefilling_last(request: Request) -> bool:
    """A stable order by this keeps the order of admission among those who decode and those who prefill."""
    return request.prefilling


@hookimpl
def swapserve_register_scheduler() -> type[Scheduler]:
    return Chunked
