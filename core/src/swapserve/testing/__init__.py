"""What a plugin author tests with: the ghost, seeded workloads, and a contract suite for each kind of policy."""

from swapserve.testing.driver import Combination, Driven, Driver
from swapserve.testing.ghost import GhostExecutor, GhostMismatch, GhostModel, ghost_info, greedy
from swapserve.testing.kv_suite import KVManagerContract
from swapserve.testing.scheduler_suite import SchedulerContract
from swapserve.testing.soundness import check_all_slots, check_engine, check_idle, snapshot
from swapserve.testing.speculator_suite import SpeculatorContract
from swapserve.testing.workloads import Arrival, Workload, make_workload

__all__ = [
    "Arrival",
    "Combination",
    "Driven",
    "Driver",
    "GhostExecutor",
    "GhostMismatch",
    "GhostModel",
    "KVManagerContract",
    "SchedulerContract",
    "SpeculatorContract",
    "Workload",
    "check_all_slots",
    "check_engine",
    "check_idle",
    "ghost_info",
    "greedy",
    "make_workload",
    "snapshot",
]
