"""The plan of one step: the only thing a scheduler acts on.

A scheduler says *who* and *how much*; the plan turns that into slots, budgets and places in the queue,
and undoes all of it when a request is preempted. Every rule that is the same for all schedulers is here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import final, overload

from swapserve.batch import Slice
from swapserve.policies import KVManager
from swapserve.request import Request


class Refusal(Enum):
    """Why a request got nothing in this step; the value is a sentence for people."""

    SEATS = "as many requests run as max_num_seqs allows"
    TOKENS = "the step has no tokens left for it under max_num_batched_tokens"
    SLOTS = "the KV cache has no room for it now"
    CLOSED = "no request is admitted in a step that preempted one"


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to `include`: how many tokens the request computes now, or why none. True when it got some."""

    tokens: int
    refused: Refusal | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True)
class Limits:
    """What a step may hold, whatever the scheduler: properties of the hardware and the model."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class PolicyError(RuntimeError):
    """A policy broke its contract; the message names the policy and what it did."""


class WaitingView(Sequence[Request]):
    """The queue as it stands, without a copy: a step must not cost more because more requests wait."""

    def __init__(self, queue: OrderedDict[str, Request]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._queue.get(request.id) is request

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Request, ...]: ...
    def __getitem__(self, index: int | slice) -> Request | tuple[Request, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self._queue))
            return tuple(islice(self._queue.values(), start, stop, step)) if step > 0 else tuple(self)[index]
        if index < 0:
            index += len(self._queue)
        for request in islice(self._queue.values(), index, index + 1) if index >= 0 else ():
            return request
        raise IndexError(f"the queue holds {len(self._queue)} requests")


@final
class StepPlan:
    """Who computes how many tokens in one step.

    `waiting` is in order of arrival, preempted requests first, and does not change while the plan is made;
    `running` is in order of admission. Both are valid during this step only.
    """

    def __init__(
        self,
        waiting: OrderedDict[str, Request],
        running: Mapping[str, Request],
        kv: KVManager,
        limits: Limits,
        now: float,
    ) -> None:
        self.waiting: Sequence[Request] = WaitingView(waiting)
        self.running: tuple[Request, ...] = tuple(running.values())
        self.now = now
        self.limits = limits
        self.tokens_left = limits.max_num_batched_tokens
        self.slices: dict[str, Slice] = {}
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.refusals: dict[str, Refusal] = {}
        """The last refusal of each request that asked and got nothing."""
        self._queue = waiting
        self._running = running
        self._kv = kv
        self._given_up: set[str] = set()
        self._num_running = len(running)

    @property
    def seats_left(self) -> int:
        """How many more requests could run."""
        return self.limits.max_num_seqs - self._num_running - len(self.admitted)

    def cached(self, request: Request) -> int:
        """How many leading tokens of a waiting request the KV cache holds; for a running one, what it computed."""
        if request.id in self._running or request.wants_prompt_logprobs:
            return request.computed
        found = self._kv.lookup(request)
        if not 0 <= found < len(request.tokens):
            raise PolicyError(
                f"KV manager {self._kv.name!r}: lookup said {found} of {len(request.tokens)} tokens; "
                "it must leave at least the last token to be computed"
            )
        return found

    def soon_cached(self, request: Request) -> bool:
        """Whether another slice of this plan is computing the next block this request lacks.

        Letting such a request wait for one step turns the work into a hit.
        """
        if request.wants_prompt_logprobs:
            return False
        owner = self._kv.awaited(request)
        return owner is not None and owner in self.slices

    def fits(self, request: Request) -> bool:
        """Whether all of a waiting request's tokens would find a seat and slots now. For admission; changes nothing."""
        if self.preempted or self.seats_left <= 0:
            return False
        return self._kv.fits(request, self.cached(request), len(request.tokens))

    def include(self, request: Request, at_most: int | None = None) -> Grant:
        """Let a request compute up to `at_most` pending tokens in this step; None means all of them or nothing.

        Slots are held for all of its verified tokens from the first slice on, so a prompt that was let in
        for one piece is not thrown out for the next. A draft that does not fit is left out. Refused means
        that nothing changed.
        """
        self._expect_open(request)
        admission = request.id not in self._running
        if request.id in self._given_up or (admission and self.preempted):
            return self._refuse(request, Refusal.CLOSED)
        if admission and self.seats_left <= 0:
            return self._refuse(request, Refusal.SEATS)
        start = self.cached(request) if admission else request.computed
        verified = len(request.tokens) - start
        wanted = verified + (len(request.draft) if request.draft else 0)
        count = self._within_tokens(request, wanted, verified, at_most)
        if count <= 0:
            return self._refuse(request, Refusal.TOKENS)
        if not self._kv.reserve(request, start, start + max(count, verified)):
            if count <= verified or not self._kv.reserve(request, start, start + verified):
                return self._refuse(request, Refusal.SLOTS)
            count = verified
        if admission:
            self._admit(request, start)
        self.refusals.pop(request.id, None)
        self.slices[request.id] = Slice(request, start, count)
        self.tokens_left -= count
        return Grant(count)

    def preempt(self, request: Request) -> None:
        """Give up a running request: its slice, tokens and slots come back, and it returns to the head of the queue."""
        if request.id not in self._running and request.id not in self.slices:
            raise PolicyError(f"request {request.id!r} does not run, so it cannot be preempted")
        if request.id in self._given_up:
            raise PolicyError(f"request {request.id!r} was given up already in this step")
        piece = self.slices.pop(request.id, None)
        if piece is not None:
            self.tokens_left += piece.count
        self._kv.free(request)
        request.computed = 0
        request.draft = None
        if request.wants_prompt_logprobs:
            # The prompt is computed again from its start: what was noted of it comes again too.
            del request.prompt_logprobs[1:]
        if request.id in self._running:
            self._num_running -= 1
            request.preemptions += 1
        else:
            self.admitted.remove(request)
        self.preempted.append(request)
        self._given_up.add(request.id)

    def make_room_for(self, request: Request, at_most: int | None = None) -> Grant:
        """`include`, and while that is refused for SLOTS, preempt the newest running request; last of all this one.

        Requests older than this one are never given up for it, so the oldest always gets on. Drafts are
        dropped before anyone is preempted.
        """
        while True:
            grant = self.include(request, at_most)
            if grant.refused is not Refusal.SLOTS or request.id not in self._running:
                return grant
            if self._drop_drafts():
                continue
            victim = self._newest()
            self.preempt(victim)
            if victim is request:
                return grant

    def _expect_open(self, request: Request) -> None:
        if request.id in self.slices:
            raise PolicyError(f"request {request.id!r} is in this step already: include each request once")
        if request.finished or (request.id not in self._running and request not in self.waiting):
            raise PolicyError(f"request {request.id!r} neither waits nor runs")

    def _refuse(self, request: Request, refused: Refusal) -> Grant:
        self.refusals[request.id] = refused
        return Grant(0, refused)

    def _within_tokens(self, request: Request, wanted: int, verified: int, at_most: int | None) -> int:
        """How many tokens the budget allows; 0 for none. A preempted request may come back in pieces: with its
        output it can have outgrown a step, even under a scheduler that splits no prompts."""
        if at_most is not None or (request.preemptions and verified > self.tokens_left):
            return min(wanted, self.tokens_left, wanted if at_most is None else at_most)
        if wanted <= self.tokens_left:
            return wanted
        return verified if verified <= self.tokens_left else 0

    def _admit(self, request: Request, cached: int) -> None:
        request.computed = cached
        found = min(cached, len(request.prompt))
        request.cached_tokens = found if request.cached_tokens is None else min(request.cached_tokens, found)
        if request.first_scheduled is None:
            request.first_scheduled = self.now
        self.admitted.append(request)

    def _drop_drafts(self) -> bool:
        """Take back the slots that drafts hold in this plan; False when there are none."""
        dropped = False
        for piece in self.slices.values():
            if not piece.num_draft:
                continue
            request = piece.request
            self._kv.commit(request)
            if not self._kv.reserve(request, request.computed, len(request.tokens)):
                raise PolicyError(f"KV manager {self._kv.name!r}: refused slots that it had just taken back")
            self.tokens_left += piece.num_draft
            piece.count -= piece.num_draft
            dropped = True
        return dropped

    def _newest(self) -> Request:
        """The running request admitted last and not given up yet."""
        if self.admitted:
            return self.admitted[-1]
        return next(request for request in reversed(self.running) if request.id not in self._given_up)
