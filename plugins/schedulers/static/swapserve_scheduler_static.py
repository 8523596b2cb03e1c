"""Static batching: fill a batch, run it to the end, then take the next. The baseline others are measured against."""

from __future__ import annotations

from typing import final

from pydantic import Field

from swapserve import PolicyOptions, Scheduler, StepPlan, hookimpl


@final
class Static(Scheduler):
    """No one joins until everyone in the batch is done; early finishers leave their seats empty.

    A request that is preempted (the cache was too small for the batch) comes back with the next batch.
    """

    name = "static"

    class Options(PolicyOptions):
        batch_size: int | None = Field(None, ge=1, description="most requests in a batch; unset: max_num_seqs")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.batch_size = options.batch_size

    def schedule(self, plan: StepPlan) -> None:
        if plan.running:
            for request in plan.running:
                plan.make_room_for(request)
        else:
            for request in plan.waiting[: self.batch_size or plan.limits.max_num_seqs]:
                if not plan.include(request):
                    break


@hookimpl
def swapserve_register_scheduler() -> type[Scheduler]:
    return Static
