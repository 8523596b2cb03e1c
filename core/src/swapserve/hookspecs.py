"""The hooks a plugin may implement: choosing policies once, watching the loop once a step, watching requests.

The loop itself calls policy objects directly; no hook is called once per request inside a step.
A watcher that raises is reported once, by name, and dropped; it never stops serving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from swapserve.plan import StepPlan
    from swapserve.policies import KVManager, Scheduler, Speculator
    from swapserve.report import StepReport
    from swapserve.request import Request

PROJECT = "swapserve"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- choosing policies: called once, while an engine is built ------------------------------------


@hookspec
def swapserve_register_scheduler() -> type[Scheduler] | list[type[Scheduler]]:  # type: ignore[empty-body]
    """Return the scheduler class (or a list of them) that this plugin offers; `name` is what users select it by."""


@hookspec
def swapserve_register_kv_manager() -> type[KVManager] | list[type[KVManager]]:  # type: ignore[empty-body]
    """Return the KV manager class (or a list of them) that this plugin offers; `name` is what users select it by."""


@hookspec
def swapserve_register_speculator() -> type[Speculator] | list[type[Speculator]]:  # type: ignore[empty-body]
    """Return the speculator class (or a list of them) that this plugin offers; `name` is what users select it by."""


# -- watching the loop: at most once each a step, results ignored ---------------------------------


@hookspec
def swapserve_step_planned(plan: StepPlan) -> None:
    """A step was planned and is about to run; the plan may be read and is valid during this call only."""


@hookspec
def swapserve_step_finished(report: StepReport) -> None:
    """A step has run and its results are committed."""


# -- watching requests -----------------------------------------------------------------------------


@hookspec
def swapserve_request_submitted(request: Request) -> None:
    """A request was accepted and waits."""


@hookspec
def swapserve_request_finished(request: Request) -> None:
    """A request ended, for whatever reason; `finish_reason` says which. Called exactly once for each one submitted."""
