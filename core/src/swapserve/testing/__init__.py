"""What a plugin author tests with: the ghost, seeded workloads, and a contract suite for each kind of policy."""

from swapserve.testing.driver import Combination, Driven, Driver
from swapserve.testing.ghost import GhostExecutor, GhostMismatch, GhostModel, ghost_info, greedy
from swapserve.testing.soundness import check_engine, check_idle, snapshot
from swapserve.testing.workloads import Arrival, Workload, make_workload

__all__ = [
    "Arrival",
    "Combination",
    "Driven",
    "Driver",
    "GhostExecutor",
    "GhostMismatch",
    "GhostModel",
    "Workload",
    "check_engine",
    "check_idle",
    "ghost_info",
    "greedy",
    "make_workload",
    "snapshot",
]
