"""Runs a workload through one combination of policies and holds every output against the ghost alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swapserve.clock import ManualClock
from swapserve.engine import Engine
from swapserve.params import SamplingParams
from swapserve.plan import StepPlan
from swapserve.policies import KVManager, Scheduler, Speculator
from swapserve.request import FinishReason, Output, Request, RequestRefused
from swapserve.testing.ghost import GhostExecutor
from swapserve.testing.soundness import check_all_slots, check_engine
from swapserve.testing.workloads import BLOCK_SIZE, Workload


@dataclass(frozen=True)
class Combination:
    """One scheduler, one KV manager and one speculator, with their options."""

    scheduler: type[Scheduler]
    kv: type[KVManager]
    speculator: type[Speculator]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by kind: `{"scheduler": {...}, "kv": {...}, "speculator": {...}}`."""

    def engine(self, workload: Workload, wrap_kv: Callable[[KVManager], KVManager] = lambda kv: kv) -> Engine:
        """A fresh engine on the ghost, with as many blocks as the workload says."""
        kv = self.kv(self._make(self.kv, "kv"), workload.num_blocks * BLOCK_SIZE)
        size = kv.block_size
        return Engine(
            executor=GhostExecutor(kv.num_slots // size, size, workload.model),
            scheduler=self.scheduler(self._make(self.scheduler, "scheduler")),
            kv=wrap_kv(kv),
            speculator=self.speculator(self._make(self.speculator, "speculator"), workload.info),
            model=workload.info,
            clock=ManualClock(),
            seed=workload.seed,
        )

    def _make(self, policy: Any, kind: str) -> Any:
        given = dict(self.options.get(kind, {}))
        if kind == "kv" and "block_size" in policy.Options.model_fields:
            given.setdefault("block_size", BLOCK_SIZE)
        return policy.Options(**given)

    def __str__(self) -> str:
        return f"{self.scheduler.name} + {self.kv.name} + {self.speculator.name}"


@dataclass
class Driven:
    """What a workload came to."""

    num_steps: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    num_proposed: int = 0
    num_accepted: int = 0


class Driver:
    """One workload on one engine, step by step, with every check after each."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self.engine, self.workload = engine, workload
        self.driven = Driven()
        self.outputs: dict[str, list[int]] = {}
        self.requests: list[Request] = []
        self.ended: dict[str, FinishReason] = {}
        self._rejected: list[tuple[int, ...]] = []
        self.step_engine: Callable[[], list[Output]] = engine.step

    def run(self, max_steps: int = 3000, before_idle: Callable[[], None] = lambda: None) -> Driven:
        """Play the workload to its end; raises `AssertionError` on the first thing that is wrong."""
        arrivals = list(self.workload.arrivals)
        aborts: dict[int, list[str]] = {}
        while arrivals or self.engine.has_work:
            step = self.driven.num_steps
            assert step < max_steps, (
                f"{len(self.engine.running)} run, {len(self.engine.waiting)} wait after {step} steps"
            )
            while arrivals and (arrivals[0].step <= step or not self.engine.has_work):
                arrival = arrivals.pop(0)
                request = self.submit(arrival.prompt, arrival.params, arrival.cache_salt)
                if request is not None and arrival.abort_at is not None:
                    aborts.setdefault(max(arrival.abort_at, step), []).append(request.id)
            for request_id in aborts.pop(step, ()):
                self.abort(request_id)
            if self.engine.has_work:
                self.step()
            self.driven.num_steps += 1
            if self.workload.follow_rejected and self._rejected and len(self.requests) < 16:
                self.submit(self._rejected.pop(), {"temperature": 0.0, "max_tokens": 1}, None)
        for request in self.requests:
            self._check_answer(request)
        before_idle()
        check_all_slots(self.engine)
        self.driven.num_requests = len(self.requests)
        self.driven.num_preemptions = self.engine.num_preemptions
        self.driven.num_cached = sum(request.cached_tokens or 0 for request in self.requests)
        return self.driven

    def submit(self, prompt: tuple[int, ...], params: Mapping[str, object], salt: str | None) -> Request | None:
        """Submit one request; None when the engine refuses it with a sentence."""
        try:
            request = self.engine.submit(prompt, SamplingParams.model_validate(dict(params)), cache_salt=salt)
        except RequestRefused:
            return None
        self.requests.append(request)
        self.outputs[request.id] = []
        return request

    def abort(self, request_id: str) -> None:
        """The client of one request leaves."""
        output = self.engine.abort(request_id)
        if output is not None:
            self._take(output)
        assert self.engine.abort(request_id) is None, "a second abort found something to end"
        check_engine(self.engine)

    def step(self) -> None:
        """One step of the engine and all that must hold after it."""
        drafts = {request.id: (len(request.tokens), request.draft) for request in self.engine.running.values()}
        outputs = self.step_engine()
        plan = self.engine.last_plan
        assert plan is not None
        self._check_plan(plan)
        for output in outputs:
            self._take(output)
            length, draft = drafts.get(output.request.id, (0, None))
            piece = plan.slices.get(output.request.id)
            num_draft = piece.end - length if piece and draft else 0
            if draft is not None and num_draft > 0:
                self._note_draft(output, length, draft.tokens[:num_draft])
        check_engine(self.engine)

    def _note_draft(self, output: Output, length: int, draft: tuple[int, ...]) -> None:
        """Count a verified draft; one with rejected tokens becomes a prompt that must not find them stored."""
        accepted = len(output.tokens) - 1
        self.driven.num_proposed += len(draft)
        self.driven.num_accepted += accepted
        if accepted < len(draft) and not output.request.finished:
            self._rejected.append((*output.request.tokens[: length + accepted], *draft[accepted:], 0))

    def _check_plan(self, plan: StepPlan) -> None:
        total = sum(piece.count for piece in plan.slices.values())
        assert total + plan.tokens_left == plan.limits.max_num_batched_tokens and plan.tokens_left >= 0, "token budget"
        assert len(self.engine.running) <= plan.limits.max_num_seqs, "more requests run than max_num_seqs"
        for piece in plan.slices.values():
            assert piece.count > 0 and piece.end <= piece.request.max_len, (
                f"{piece.request.id}: past its greatest length"
            )

    def _take(self, output: Output) -> None:
        name = output.request.id
        assert name not in self.ended, f"{name} gave output after its final output"
        assert output.error is None, output.error
        self.outputs[name].extend(output.tokens)
        if output.finish_reason is not None:
            self.ended[name] = output.finish_reason

    def _check_answer(self, request: Request) -> None:
        expected = self.workload.model.continuation(request)
        got = self.outputs[request.id]
        reason = self.ended.get(request.id)
        assert reason is not None, f"{request.id} never ended"
        assert list(request.output) == got, f"{request.id}: outputs and request disagree"
        if reason is FinishReason.ABORT:
            expected = expected[: len(got)]
        assert got == expected, f"{request.id}: {got} instead of {expected}"
        if reason is FinishReason.LENGTH:
            assert len(request.tokens) == request.max_len
        if reason is FinishReason.STOP:
            assert request.tokens[-1] in request.stop_ids
