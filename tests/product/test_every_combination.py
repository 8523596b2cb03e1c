"""The product: every scheduler × KV manager × speculator gives the tokens that one request at a time gives."""

from __future__ import annotations

from itertools import product

import pytest

from swapserve import Plugins
from swapserve.policies import KVManager, Scheduler, Speculator
from swapserve.testing import Combination, Driver, make_workload
from swapserve.testing.simple import ghost_options
from swapserve.testing.wrappers import WatchedKV

SCHEDULERS = ("static", "continuous", "chunked")
KV_MANAGERS = ("contiguous", "paged", "prefix")
SPECULATORS = ("none", "ngram", "draft")
NUM_WORKLOADS = 400
# With few tokens a step, prompts are computed in pieces where the scheduler can.
VARIANTS = {"chunked": [{}, {"chunk_size": 3}, {"chunk_size": 9}]}


def combination(scheduler: str, kv: str, speculator: str, seed: int) -> Combination:
    plugins = Plugins()
    chosen = {
        "scheduler": plugins.policy("scheduler", scheduler),
        "kv": plugins.policy("kv", kv),
        "speculator": plugins.policy("speculator", speculator),
    }
    options = {kind: ghost_options(policy) for kind, policy in chosen.items()}
    variants = VARIANTS.get(scheduler, [{}])
    options["scheduler"] = variants[seed % len(variants)]
    classes = (chosen["scheduler"], chosen["kv"], chosen["speculator"])
    assert (
        issubclass(classes[0], Scheduler) and issubclass(classes[1], KVManager) and issubclass(classes[2], Speculator)
    )
    return Combination(classes[0], classes[1], classes[2], options)


@pytest.mark.parametrize(
    ("scheduler", "kv", "speculator"), list(product(SCHEDULERS, KV_MANAGERS, SPECULATORS)), ids=str
)
def test_equal_to_one_at_a_time(scheduler: str, kv: str, speculator: str) -> None:
    """Seeded workloads from tight to ample memory: equal tokens, no slot leaked, every step checked."""
    variants = [combination(scheduler, kv, speculator, n) for n in range(3)]
    total = {"preemptions": 0, "cached": 0, "proposed": 0, "accepted": 0}
    for seed in range(NUM_WORKLOADS):
        workload = make_workload(seed)
        try:
            driven = Driver(variants[seed % 3].engine(workload, WatchedKV), workload).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total["preemptions"] += driven.num_preemptions
        total["cached"] += driven.num_cached
        total["proposed"] += driven.num_proposed
        total["accepted"] += driven.num_accepted
    # The workloads must have met what they are there to test.
    assert kv == "contiguous" or total["preemptions"] >= 10, total
    assert (total["cached"] > 500) == (kv == "prefix"), total
    assert speculator == "none" or total["proposed"] > total["accepted"] > 100, total


def test_these_are_all_the_policies_there_are() -> None:
    """A policy added to the repository joins the product, or this fails."""
    plugins = Plugins()
    ours = {
        kind: sorted(
            record.offers[1]
            for record in plugins.records
            if record.distribution.startswith("swapserve") and record.offers and record.offers[0] == kind
        )
        for kind in ("scheduler", "kv", "speculator")
    }
    assert ours == {"scheduler": sorted(SCHEDULERS), "kv": sorted(KV_MANAGERS), "speculator": sorted(SPECULATORS)}
