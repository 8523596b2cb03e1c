"""The plainest policies that are right: what a policy under test is combined with when nothing else is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from swapserve.no_speculation import NoSpeculation
from swapserve.plan import StepPlan
from swapserve.plugins import Plugins, PolicyClass
from swapserve.policies import KVManager, PolicyOptions, Scheduler, Speculator
from swapserve.request import Draft, Request
from swapserve.testing.driver import Combination


class SimpleScheduler(Scheduler):
    """Everyone who runs goes on; newcomers join in order while there is room."""

    name = "simple"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running:
            plan.make_room_for(request)
        for request in plan.waiting:
            if not plan.include(request):
                break


class SimpleKV(KVManager):
    """Blocks from a free list, given back when they are not needed."""

    name = "simple"

    class Options(PolicyOptions):
        block_size: int = 4

    def __init__(self, options: Options, num_slots: int) -> None:
        super().__init__(options, num_slots)
        self.block_size = options.block_size
        self._free = list(range(num_slots // options.block_size))
        self._tables: dict[str, list[int]] = {}

    def _missing(self, request: Request, total: int) -> int:
        return -(-total // self.block_size) - len(self._tables.get(request.id, ()))

    def fits(self, request: Request, cached: int, total: int) -> bool:
        return self._missing(request, total) <= len(self._free)

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        if not self.fits(request, cached, total):
            return False
        table = self._tables.setdefault(request.id, [])
        for _ in range(self._missing(request, total)):
            table.append(self._free.pop())
        return True

    def table(self, request: Request) -> Sequence[int]:
        return self._tables.get(request.id, ())

    def commit(self, request: Request) -> None:
        table = self._tables.get(request.id, [])
        while len(table) > -(-len(request.tokens) // self.block_size):
            self._free.append(table.pop())

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.id, ()))

    def usage(self) -> float:
        held = sum(len(table) for table in self._tables.values())
        return held * self.block_size / self.num_slots


class GuessingSpeculator(Speculator):
    """Guesses at random, now right, now wrong, sometimes nothing: hard on whoever must take rejected drafts back."""

    name = "guessing"
    max_draft = 3

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        drafts = {}
        for request in requests:
            rng = random.Random(f"{request.seed}/{len(request.tokens)}")
            tokens = tuple(rng.choice(request.tokens) for _ in range(rng.randint(0, self.max_draft)))
            if tokens:
                drafts[request.id] = Draft(tokens)
        return drafts


_SIMPLE: Mapping[str, Sequence[PolicyClass]] = {
    "scheduler": [SimpleScheduler],
    "kv": [SimpleKV],
    "speculator": [NoSpeculation, GuessingSpeculator],
}


@cache
def partners(kind: str) -> tuple[PolicyClass, ...]:
    """The policies of a kind to combine with: the simple ones and every installed one that loads."""
    plugins = Plugins()
    plugins.load_all()
    installed = [offered for record in plugins.records for offered in record.policies.get(kind, ())]
    known = {policy.name: policy for policy in (*_SIMPLE[kind], *installed)}
    return tuple(known.values())


def ghost_options(policy: PolicyClass) -> dict[str, Any]:
    """Options with which an installed policy runs on the ghost: one that wants a model gets a ghost."""
    return {"model": "ghost:0.7"} if "model" in policy.Options.model_fields else {}


def combinations(kind: str, policy: PolicyClass, options: Mapping[str, Any], seed: int) -> Iterator[Combination]:
    """The policy under test with every pair of partners of the other kinds, in an order that the seed shuffles."""
    kinds = [other for other in ("scheduler", "kv", "speculator") if other != kind]
    pairs = list(product(*(partners(other) for other in kinds)))
    random.Random(seed).shuffle(pairs)
    for pair in pairs:
        chosen: dict[str, Any] = {kind: policy, **dict(zip(kinds, pair, strict=True))}
        given = {other: ghost_options(chosen[other]) for other in kinds} | {kind: options}
        yield Combination(chosen["scheduler"], chosen["kv"], chosen["speculator"], given)
