"""What one step did, for those who watch the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapserve.request import Output


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step in numbers; times in seconds."""

    index: int
    """Steps that computed something before this one."""
    started: float
    """The engine clock when planning began."""
    num_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    preempted: Sequence[str]
    """Ids of the requests that were given up."""
    kv_usage: float
    """The share of KV slots that live requests hold, 0 to 1."""
    drafts_proposed: int
    drafts_accepted: int
    plan_seconds: float
    execute_seconds: float
    commit_seconds: float
    propose_seconds: float
    outputs: Sequence[Output]
