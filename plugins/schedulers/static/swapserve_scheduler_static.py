"""Static batching: fill a batch, run it to the end, then take the next. The baseline others are measured against."""

from __future__ import annotations

from typing import final

from pydantic import Field

from swapserve import PolicyOptions, Refusal, Scheduler, StepPlan, hookimpl


@final
class Static(Scheduler):
    """No one joins until everyone in the batch is done; early finishers leave their seats empty.

    The prompts of a batch may take several steps, and no one decodes before the last of them. A request that is
    preempted (the cache was too small for the batch) comes back with the next batch.
    """

    name = "static"

    class Options(PolicyOptions):
        batch_size: int | None = Field(None, ge=1, description="most requests in a batch; unset: max_num_seqs")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.batch_size = options.batch_size
        self._filling = True

    def schedule(self, plan: StepPlan) -> None:
        if self._filling or not plan.running:
            self._filling = self._fill(plan)
        if not plan.slices:
            for request in plan.running:
                plan.make_room_for(request)

    def _fill(self, plan: StepPlan) -> bool:
        """Let the next prompts into the batch; True when only the step's tokens ran out, so that more may follow."""
        seats = (self.batch_size or plan.limits.max_num_seqs) - len(plan.running)
        for request in plan.waiting[:seats]:
            grant = plan.include(request)
            if not grant:
                return grant.refused is Refusal.TOKENS
        return False


@hookimpl
def swapserve_register_scheduler() -> type[Scheduler]:
    return Static
