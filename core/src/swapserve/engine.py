"""The engine: one step after another, each planned by a scheduler, run by an executor, committed, and drafted ahead.

The engine owns the requests and their places; it knows no policy by name. It is not thread-safe: whoever
owns it calls `submit`, `abort` and `step` from one thread.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import final

import pluggy

from swapserve.admission import check_token_ids, greatest_length
from swapserve.batch import Batch, Executor, Verdict
from swapserve.clock import Clock, MonotonicClock
from swapserve.params import SamplingParams
from swapserve.plan import Limits, PolicyError, StepPlan
from swapserve.policies import KVManager, ModelInfo, Scheduler, Speculator
from swapserve.report import StepReport
from swapserve.request import Draft, FinishReason, Output, Request, RequestRefused
from swapserve.watchers import Watchers


class Stalled(RuntimeError):
    """Work is left and the scheduler planned nothing; the message says why each request was refused."""


@final
class Engine:
    """Serves requests on one model with one scheduler, one KV manager and one speculator."""

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        kv: KVManager,
        speculator: Speculator,
        model: ModelInfo,
        limits: Limits | None = None,
        plugins: pluggy.PluginManager | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> None:
        self.executor, self.scheduler, self.kv, self.speculator = executor, scheduler, kv, speculator
        self.model = model
        self.limits = limits or Limits(model.max_num_seqs, model.max_num_batched_tokens, model.max_model_len)
        self.clock = clock or MonotonicClock()
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_failed = 0
        self._watchers = Watchers(plugins)
        self._random = random.Random(seed)
        self._ids = count()
        self.last_plan: StepPlan | None = None
        """The plan of the step that ran last, or is running."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Take a prompt of token ids into the queue; `RequestRefused` when it could never run."""
        params = params or SamplingParams()
        max_len = self.validate(prompt, params, cache_salt)
        request_id = f"req-{next(self._ids)}" if request_id is None else request_id
        if request_id in self.waiting or request_id in self.running:
            raise RequestRefused(f"a request with the id {request_id!r} is live: choose another id", "request_id")
        eos = frozenset() if params.ignore_eos else self.model.eos_token_ids
        request = Request(
            id=request_id,
            prompt=tuple(prompt),
            params=params,
            arrival=self.clock.now(),
            priority=priority,
            cache_salt=cache_salt,
            max_len=max_len,
            stop_ids=eos.union(params.stop_token_ids),
            seed=self._random.getrandbits(64) if params.seed is None else params.seed % 2**64,
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs.append(None)
        self.waiting[request.id] = request
        self._watchers.notify("swapserve_request_submitted", request=request)
        return request

    def validate(self, prompt: Sequence[int], params: SamplingParams, cache_salt: str | None = None) -> int:
        """Raise `RequestRefused` for what `submit` would refuse; returns the length at which the request ends.

        Changes nothing and looks only at what never changes, so any thread may ask.
        """
        check_token_ids(prompt, params, self.model.vocab_size)
        if cache_salt == "":
            raise RequestRefused("cache_salt is empty: leave it out or give it at least one character", "cache_salt")
        return greatest_length(len(prompt), params.max_tokens, self.limits, self.kv, self.scheduler)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Output | None:
        """End a request between two steps and return its final output; None for one that ended or never was."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        return None if request is None else self._end(request, reason)

    def run(self) -> Iterator[Output]:
        """Step until no work is left, yielding outputs as they come."""
        while self.has_work:
            yield from self.step()

    def step(self) -> list[Output]:
        """Compute one batch: plan, run, verify, commit, draft.

        Raises `Stalled` when the scheduler plans nothing though work is left, and whatever a policy or the
        executor raises; `recover` then ends the requests that the step held.
        """
        times = [self.clock.now()]
        plan = self.last_plan = StepPlan(self.waiting, self.running, self.kv, self.limits, times[0])
        self.scheduler.schedule(plan)
        self._settle(plan)
        self._watchers.notify("swapserve_step_planned", plan=plan)
        if not plan.slices:
            self._raise_if_stalled(plan)
            return []
        times.append(self.clock.now())
        verdicts = self.executor.execute(Batch.from_plan(plan, self.kv))
        times.append(self.clock.now())
        outputs, live, drafts = self._commit(plan, verdicts)
        times.append(self.clock.now())
        for request_id, draft in self.speculator.propose(live).items():
            self._attach(request_id, draft)
        times.append(self.clock.now())
        self._watchers.notify("swapserve_step_finished", report=self._report(plan, outputs, drafts, times))
        self.num_steps += 1
        return outputs

    def recover(self, error: Exception) -> list[Output]:
        """After `step` raised: end, with that error, every request the failed step held, and keep the others.

        When the step held none (a scheduler that raised at once, a stall), everyone who runs is ended, and
        when no one runs, everyone who waits: the engine always gets on.
        """
        plan, self.last_plan = self.last_plan, None
        held: list[Request] = []
        if plan is not None:
            self._settle(plan)
            held = [piece.request for piece in plan.slices.values() if not piece.request.finished]
        held = held or list(self.running.values()) or list(self.waiting.values())
        message = f"{type(error).__name__}: {error}"
        return [self._end(request, FinishReason.ERROR, message) for request in held]

    def _settle(self, plan: StepPlan) -> None:
        """Move requests to where the plan put them; done once for a plan."""
        for request in plan.preempted:
            if self.running.pop(request.id, None) is not None:
                self.waiting[request.id] = request
                self.waiting.move_to_end(request.id, last=False)
                self.speculator.forget(request)
                self.num_preemptions += 1
        for request in plan.admitted:
            if self.waiting.pop(request.id, None) is not None:
                self.running[request.id] = request

    def _commit(
        self, plan: StepPlan, verdicts: Sequence[Verdict]
    ) -> tuple[list[Output], list[Request], tuple[int, int]]:
        """Write the verdicts into the requests.

        Returns the outputs, the requests that go on decoding, and how many draft tokens were verified and accepted.
        """
        outputs: list[Output] = []
        live: list[Request] = []
        num_proposed = num_accepted = 0
        for piece, verdict in zip(plan.slices.values(), verdicts, strict=True):
            request = piece.request
            if verdict.prompt_logprobs is not None:
                request.prompt_logprobs.extend(verdict.prompt_logprobs)
            if verdict.error is not None:
                outputs.append(self._end(request, FinishReason.ERROR, verdict.error))
                continue
            if not piece.samples:
                request.computed = piece.end
                self.kv.commit(request)
                continue
            if num_draft := piece.num_draft:
                num_proposed += num_draft
                num_accepted += len(verdict.tokens) - 1
                self.speculator.observe(request, num_draft, len(verdict.tokens) - 1)
            taken = request.accept(verdict.tokens)
            self.kv.commit(request)
            logprobs = verdict.logprobs[:taken] if verdict.logprobs is not None else None
            outputs.append(Output(request, verdict.tokens[:taken], logprobs, request.finish_reason))
            if request.finished:
                self._forget(request)
            elif request.draft_room:
                live.append(request)
        return outputs, live, (num_proposed, num_accepted)

    def _attach(self, request_id: str, draft: Draft) -> None:
        """Give a running request its draft, cut to what is of use."""
        request = self.running.get(request_id)
        name, size = self.speculator.name, self.model.vocab_size
        if request is None:
            raise PolicyError(f"speculator {name!r} proposed for {request_id!r}, which was not asked for")
        if not all(0 <= token < size for token in draft.tokens):
            raise PolicyError(f"speculator {name!r} proposed a token outside the vocabulary of {size}")
        request.draft = draft.cut(min(self.speculator.max_draft, request.draft_room))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """Finish a request outside the normal course; its final output carries no tokens."""
        request.finish_reason, request.error, request.draft = reason, error, None
        if reason is FinishReason.ERROR:
            self.num_failed += 1
            self.kv.discard(request)
        self._forget(request)
        return Output(request, finish_reason=reason, error=error)

    def _forget(self, request: Request) -> None:
        self.waiting.pop(request.id, None)
        self.running.pop(request.id, None)
        self.kv.free(request)
        self.scheduler.forget(request)
        self.speculator.forget(request)
        self.executor.forget(request)
        self._watchers.notify("swapserve_request_finished", request=request)

    def _report(
        self, plan: StepPlan, outputs: Sequence[Output], drafts: tuple[int, int], times: Sequence[float]
    ) -> StepReport:
        """`times`: when planning, running, committing and drafting began, and when drafting ended."""
        return StepReport(
            index=self.num_steps,
            started=times[0],
            num_tokens=self.limits.max_num_batched_tokens - plan.tokens_left,
            num_requests=len(plan.slices),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            preempted=[request.id for request in plan.preempted],
            kv_usage=self.kv.usage(),
            drafts_proposed=drafts[0],
            drafts_accepted=drafts[1],
            plan_seconds=times[1] - times[0],
            execute_seconds=times[2] - times[1],
            commit_seconds=times[3] - times[2],
            propose_seconds=times[4] - times[3],
            outputs=outputs,
        )

    def _raise_if_stalled(self, plan: StepPlan) -> None:
        if not self.has_work or plan.preempted:
            return
        why = [f"{request_id}: {refusal.value}" for request_id, refusal in list(plan.refusals.items())[:10]]
        raise Stalled(
            f"scheduler {self.scheduler.name!r} planned nothing though {len(self.running)} requests run and "
            f"{len(self.waiting)} wait. Refused: " + ("; ".join(why) or "no one, since no one was included")
        )
