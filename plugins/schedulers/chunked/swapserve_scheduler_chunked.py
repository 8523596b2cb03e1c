"""Chunked prefill (Sarathi-Serve, Agrawal et al. 2024): decodes first, then pieces of prompts."""

from __future__ import annotations

from typing import final

from pydantic import Field

from swapserve import PolicyOptions, Request, Scheduler, StepPlan, hookimpl


@final
class Chunked(Scheduler):
    """Everyone who decodes gets on in every step; what is left of the chunk goes to prompts, oldest first.

    A newcomer is let in only when all of its prompt has room, and waits one step when its next block is being
    computed by another in this step.
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
        for request in sorted(plan.running, key=_prefilling_last):
            if left:
                left -= plan.make_room_for(request, at_most=self._piece(request, left)).tokens
        for request in plan.waiting[: plan.limits.max_num_seqs]:
            if plan.soon_cached(request):
                continue
            if not left or not plan.fits(request):
                break
            left -= plan.include(request, at_most=self._piece(request, left)).tokens

    def _piece(self, request: Request, left: int) -> int:
        """How much of the chunk one request may take."""
        return min(left, self.longest_piece) if self.longest_piece and request.prefilling else left


def _prefilling_last(request: Request) -> bool:
    """A stable order by this keeps the order of admission among those who decode and those who prefill."""
    return request.prefilling


@hookimpl
def swapserve_register_scheduler() -> type[Scheduler]:
    return Chunked
