"""Continuous batching (Orca, Yu et al. 2022): a seat that becomes free is taken in the next step."""

from __future__ import annotations

from typing import final

from swapserve import Scheduler, StepPlan, hookimpl


@final
class Continuous(Scheduler):
    """Everyone who runs goes on; newcomers join with their whole prompt while there is room.

    A newcomer whose next block is being computed by another in this step waits one step and then shares it.
    """

    name = "continuous"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running:
            plan.make_room_for(request)
        for request in plan.waiting[: 2 * plan.limits.max_num_seqs]:
            if plan.seats_left and plan.soon_cached(request):
                continue
            if not plan.include(request):
                break


@hookimpl
def swapserve_register_scheduler() -> type[Scheduler]:
    return Continuous
