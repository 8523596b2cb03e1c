"""The contract suites are tests of policies; these are tests of the suites: each planted fault must turn one red.

Managers' own `check` is switched off, so that it is the suite that finds the fault and not the policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import swapserve_kv_prefix as prefix_module
from swapserve_kv_contiguous import Contiguous
from swapserve_kv_paged import Paged
from swapserve_kv_prefix import Prefix
from swapserve_scheduler_continuous import Continuous
from swapserve_speculator_ngram import Ngram

from swapserve import Draft, Request, StepPlan
from swapserve.policies import KVManager, Scheduler, Speculator
from swapserve.testing import KVManagerContract, SchedulerContract, SpeculatorContract


def red_tests(suite: type, faulty: type) -> Iterator[str]:
    """The tests of a suite that fail for a policy, one after another."""
    contract = type("Faulty", (suite,), {"policy": faulty})()
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_") and not inspect.signature(test).parameters:
            try:
                test()
            except (AssertionError, IndexError, KeyError, ValueError, RuntimeError):
                yield name


class Unchecked:
    def check(self) -> None: ...


class HitsAreNotPinned(Unchecked, Prefix):  # type: ignore[misc]
    """A block that is shared stays on the list of those that may be evicted."""

    def _hold(self, block: int) -> None:
        self._holders[block] += 1

    def _release(self, block: int) -> None:
        self._unheld.pop(block, None)
        super()._release(block)


class HashIsNotChained(Unchecked, Prefix):  # type: ignore[misc]
    """A block is found by its own tokens, whatever came before."""

    def _digest(self, request: Request, index: int) -> bytes:
        return repr((request.cache_salt, self._tokens(request, index))).encode()


class HashWithoutSalt(Unchecked, Prefix):  # type: ignore[misc]
    """Tenants find each other's blocks."""

    def _digest(self, request: Request, index: int) -> bytes:
        return repr(request.tokens[: (index + 1) * self.block_size]).encode()


class TrimsOneBlockTooMany(Unchecked, Paged):  # type: ignore[misc]
    def commit(self, request: Request) -> None:
        table = self._tables.get(request.id, [])
        while len(table) > len(request.tokens) // self.block_size:
            self._free.append(table.pop())


class TrimsPromptsInPieces(Unchecked, Paged):  # type: ignore[misc]
    """Takes back the slots of prompt tokens that are not computed yet."""

    def commit(self, request: Request) -> None:
        table = self._tables.get(request.id, [])
        while len(table) > -(-request.computed // self.block_size):
            self._free.append(table.pop())


class FreesTwice(Unchecked, Paged):  # type: ignore[misc]
    def free(self, request: Request) -> None:
        self._free.extend(self._tables.get(request.id, ()))
        super().free(request)


class PublishesUnverifiedDrafts(Unchecked, Prefix):  # type: ignore[misc]
    """Blocks become findable when they are reserved, drafts and all, and not when they are verified."""

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        if not super().reserve(request, cached, total):
            return False
        real, held = request.tokens, self._held[request.id]
        request.tokens = real + list(request.draft.tokens if request.draft else ())
        for index in range(len(held.chain), min(total, len(request.tokens)) // self.block_size):
            self._publish(request, held, index)
        self._known.pop(request.id, None)
        request.tokens = real
        return True


class SharesTheLastBlock(Unchecked, Contiguous):  # type: ignore[misc]
    """Runs overlap by one block, which the first of two requests may never come to use."""

    def _first_fit(self, needed: int) -> int | None:
        return super()._first_fit(max(1, needed - 1))


class ForgetsABlock(Unchecked, Paged):  # type: ignore[misc]
    """One block a request is lost for ever."""

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.id, [])[1:])


class NewestFirst(Scheduler):
    """The last in the queue waits as long as others come."""

    name = "newest-first"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running:
            plan.make_room_for(request)
        for request in reversed(plan.waiting[:]):
            if not plan.include(request):
                break


class LeavesTheLastOut(Scheduler):
    """The last of those who run gets nothing while others run."""

    name = "leaves-the-last-out"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running[: max(1, len(plan.running) - 1)]:
            plan.make_room_for(request)
        for request in plan.waiting[: plan.limits.max_num_seqs]:
            if not plan.include(request):
                break


class ReadsTheWholeQueue(Scheduler):
    name = "reads-the-whole-queue"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running:
            plan.make_room_for(request)
        for request in sorted(plan.waiting, key=lambda one: one.arrival):
            if not plan.include(request):
                break


class NeverGivesUp(Scheduler):
    """Two requests that each need one more block wait for each other for ever."""

    name = "never-gives-up"

    def schedule(self, plan: StepPlan) -> None:
        for request in [*plan.running, *plan.waiting[: plan.limits.max_num_seqs]]:
            plan.include(request)


class SchedulerThatWrites(Scheduler):
    name = "writes"

    def schedule(self, plan: StepPlan) -> None:
        for request in plan.running:
            request.priority += 1
            plan.make_room_for(request)
        for request in plan.waiting[: plan.limits.max_num_seqs]:
            if not plan.include(request):
                break


class SpeculatorThatWrites(Ngram):  # type: ignore[misc]
    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        drafts = super().propose(requests)
        for request in requests:
            request.draft = drafts.get(request.id)
        return drafts


class ProposesTooMuch(Ngram):  # type: ignore[misc]
    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        return {request.id: Draft((1,) * (self.max_draft + 1)) for request in requests}


class AnswersForStrangers(Ngram):  # type: ignore[misc]
    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        return {**super().propose(requests), "a stranger": Draft((1,))}


KV_FAULTS: list[type[KVManager]] = [
    HitsAreNotPinned,
    HashIsNotChained,
    HashWithoutSalt,
    TrimsOneBlockTooMany,
    TrimsPromptsInPieces,
    FreesTwice,
    PublishesUnverifiedDrafts,
    SharesTheLastBlock,
    ForgetsABlock,
]
SCHEDULER_FAULTS: list[type[Scheduler]] = [
    NewestFirst,
    LeavesTheLastOut,
    ReadsTheWholeQueue,
    NeverGivesUp,
    SchedulerThatWrites,
]
SPECULATOR_FAULTS: list[type[Speculator]] = [SpeculatorThatWrites, ProposesTooMuch, AnswersForStrangers]


@pytest.mark.parametrize("fault", KV_FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_kv_manager_is_found(fault: type[KVManager], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in (HashIsNotChained, HashWithoutSalt):
        # The manager compares tokens besides digests; a fault in the digest shows where it does not.
        monkeypatch.setattr(prefix_module._Entry, "holds", lambda *_: True)
    assert next(red_tests(KVManagerContract, fault), None)


@pytest.mark.parametrize("fault", SCHEDULER_FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_scheduler_is_found(fault: type[Scheduler]) -> None:
    assert next(red_tests(SchedulerContract, fault), None)


@pytest.mark.parametrize("fault", SPECULATOR_FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_speculator_is_found(fault: type[Speculator]) -> None:
    assert next(red_tests(SpeculatorContract, fault), None)


def test_a_sound_policy_is_not() -> None:
    """What the faulty ones differ from passes every test: the faults are what is found."""
    sound: list[tuple[type, Any]] = [
        (KVManagerContract, type("Sound", (Unchecked, Prefix), {})),
        (SchedulerContract, Continuous),
        (SpeculatorContract, Ngram),
    ]
    assert [name for suite, policy in sound for name in red_tests(suite, policy)] == []
