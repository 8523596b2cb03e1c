"""Policies wrapped so that a broken promise is seen at the call that breaks it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from swapserve.plan import StepPlan
from swapserve.policies import KVManager, PolicyOptions, Scheduler, Speculator
from swapserve.request import Draft, Request
from swapserve.testing.soundness import snapshot


class WatchedKV(KVManager):
    """A KV manager whose every call is checked for writing to the request."""

    def __init__(self, inner: KVManager) -> None:
        super().__init__(PolicyOptions(), inner.num_slots)
        self.inner, self.name, self.block_size = inner, inner.name, inner.block_size  # type: ignore[misc]

    def lookup(self, request: Request) -> int:
        before = snapshot(request)
        found = self.inner.lookup(request)
        self._same(before, request, "lookup")
        return found

    def awaited(self, request: Request) -> str | None:
        before = snapshot(request)
        owner = self.inner.awaited(request)
        self._same(before, request, "awaited")
        return owner

    def fits(self, request: Request, cached: int, total: int) -> bool:
        before = snapshot(request)
        answer = self.inner.fits(request, cached, total)
        self._same(before, request, "fits")
        return answer

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        before = snapshot(request)
        expected = self.inner.fits(request, cached, total)
        held = list(self.inner.table(request))
        answer = self.inner.reserve(request, cached, total)
        assert answer == expected, f"{self.name}: fits said {expected} and reserve said {answer}"
        now = list(self.inner.table(request))
        assert now[: len(held)] == held, f"{self.name}: reserve changed blocks that were held already"
        if answer:
            assert len(now) * self.block_size >= total, f"{self.name}: reserve of {total} gave {len(now)} blocks"
        else:
            assert now == held, f"{self.name}: a refused reserve changed the table"
        self._same(before, request, "reserve")
        return answer

    def table(self, request: Request) -> Sequence[int]:
        return self.inner.table(request)

    def commit(self, request: Request) -> None:
        before = snapshot(request)
        held = list(self.inner.table(request))
        self.inner.commit(request)
        kept = list(self.inner.table(request))
        needed = -(-len(request.tokens) // self.block_size)
        assert kept == held[: len(kept)], f"{self.name}: commit changed blocks of the table"
        assert len(kept) >= min(len(held), needed), f"{self.name}: commit took back blocks of verified tokens"
        self._same(before, request, "commit")

    def free(self, request: Request) -> None:
        before = snapshot(request)
        self.inner.free(request)
        assert not self.inner.table(request), f"{self.name}: free left blocks in the table"
        self._same(before, request, "free")

    def discard(self, request: Request) -> None:
        self.inner.discard(request)

    def usage(self) -> float:
        return self.inner.usage()

    def longest(self) -> int:
        return self.inner.longest()

    def check(self) -> None:
        self.inner.check()

    def _same(self, before: tuple[object, ...], request: Request, call: str) -> None:
        assert snapshot(request) == before, f"{self.name}: {call} wrote to request {request.id}"


class RefusingKV(WatchedKV):
    """A KV manager that also says no at random, never often enough to stop all progress."""

    def __init__(self, inner: KVManager, seed: int, share: float = 0.2) -> None:
        super().__init__(inner)
        self._random, self._share = random.Random(seed), share
        self._granted: dict[str, int] = {}

    def relent(self) -> None:
        """Refuse nothing from now on that the manager itself would grant."""
        self._share = 0.0

    def fits(self, request: Request, cached: int, total: int) -> bool:
        return self._random.random() >= self._share and super().fits(request, cached, total)

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        # What was granted once and is asked for again (slots of a dropped draft, say) is never refused.
        if total > self._granted.get(request.id, 0) and self._random.random() < self._share:
            return False
        granted = super().reserve(request, cached, total)
        if granted:
            self._granted[request.id] = total
        return granted

    def free(self, request: Request) -> None:
        self._granted.pop(request.id, None)
        super().free(request)


class WatchedScheduler(Scheduler):
    """A scheduler checked for writing to requests, and whose view of the queue counts how much it read."""

    def __init__(self, inner: Scheduler) -> None:
        super().__init__(PolicyOptions())
        self.inner, self.name = inner, inner.name  # type: ignore[misc]
        self.splits_prompts = inner.splits_prompts  # type: ignore[misc]

    def schedule(self, plan: StepPlan) -> None:
        everyone = [*plan.running, *plan.waiting]
        before = {request.id: snapshot(request) for request in everyone}
        self.inner.schedule(plan)
        moved = {request.id for request in (*plan.admitted, *plan.preempted)}
        for request in everyone:
            if request.id not in moved:
                assert snapshot(request) == before[request.id], f"{self.name} wrote to request {request.id}"
            else:
                assert snapshot(request)[:3] == before[request.id][:3], f"{self.name} wrote to request {request.id}"

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


class WatchedSpeculator(Speculator):
    """A speculator checked for writing to requests and for proposing more than it may."""

    def __init__(self, inner: Speculator) -> None:
        super().__init__(PolicyOptions(), inner.target)
        self.inner, self.name, self.max_draft = inner, inner.name, inner.max_draft  # type: ignore[misc]

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        before = [snapshot(request) for request in requests]
        drafts = self.inner.propose(requests)
        for request, was in zip(requests, before, strict=True):
            assert snapshot(request) == was, f"{self.name}: propose wrote to request {request.id}"
        asked = {request.id for request in requests}
        for request_id, draft in drafts.items():
            assert request_id in asked, f"{self.name}: a draft for {request_id}, which was not asked for"
            assert len(draft) <= self.max_draft, f"{self.name}: a draft of {len(draft)}, max_draft is {self.max_draft}"
            assert all(0 <= token < self.target.vocab_size for token in draft.tokens), f"{self.name}: not a token"
        return drafts

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        before = snapshot(request)
        self.inner.observe(request, proposed, accepted)
        assert snapshot(request) == before, f"{self.name}: observe wrote to request {request.id}"

    def forget(self, request: Request) -> None:
        before = snapshot(request)
        self.inner.forget(request)
        assert snapshot(request) == before, f"{self.name}: forget wrote to request {request.id}"
