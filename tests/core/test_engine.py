"""The engine: what it takes in, what it gives out, and how it gets on when something breaks."""

from __future__ import annotations

from typing import Any

import pytest

from swapserve import (
    Draft,
    Engine,
    FinishReason,
    KVManager,
    ManualClock,
    Plugins,
    PolicyError,
    RequestRefused,
    SamplingParams,
    Scheduler,
    Stalled,
    StepPlan,
    Verdict,
)
from swapserve.no_speculation import NoSpeculation
from swapserve.testing import GhostExecutor, GhostModel, check_idle, ghost_info, greedy
from swapserve.testing.simple import GuessingSpeculator, SimpleKV, SimpleScheduler


def engine_with(num_blocks: int = 20, scheduler: type[Scheduler] = SimpleScheduler, **limits: Any) -> Engine:
    info = ghost_info(**{"max_model_len": 64, "max_num_batched_tokens": 64, **limits})
    return Engine(
        executor=GhostExecutor(num_blocks, 4),
        scheduler=scheduler(scheduler.Options()),
        kv=SimpleKV(SimpleKV.Options(block_size=4), num_blocks * 4),
        speculator=NoSpeculation(NoSpeculation.Options(), info),
        model=info,
        clock=ManualClock(),
        seed=0,
    )


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass
    check_idle(engine)


def test_run_streams_every_token_once() -> None:
    engine = engine_with()
    request = engine.submit([1, 2, 3], greedy(6))
    outputs = list(engine.run())
    assert [token for output in outputs for token in output.tokens] == GhostModel().continuation(request)
    assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [(40, 1, "40 .* 32"), (20, 30, "20 .* 30.* 49 .* 32"), (33, None, "33 .* 32")],
)
def test_h01_what_the_pool_can_never_hold_is_refused(prompt: int, max_tokens: int | None, numbers: str) -> None:
    """H01, H02: a sentence with the numbers and the flag; requests behind it are served."""
    engine = engine_with(num_blocks=8)
    if prompt == 33:
        prompt = 34
        numbers = "34 .* 32"
    with pytest.raises(RequestRefused, match=numbers + r".*--kv-cache-memory-bytes"):
        engine.submit([1] * prompt, greedy(max_tokens))
    behind = engine.submit([1] * 4, greedy(2))
    finish(engine)
    assert behind.num_output_tokens == 2


def test_h01_the_last_slot_can_be_used() -> None:
    """H01: prompt + output - 1 = all 32 slots: nothing is held back for anything else."""
    engine = engine_with(num_blocks=8)
    request = engine.submit([1] * 20, greedy(13))
    finish(engine)
    assert request.num_output_tokens == 13 and request.preemptions == 0


def test_h02_without_max_tokens_the_pool_is_the_limit() -> None:
    """H02: an output that would outgrow the pool ends with `length`."""
    engine = engine_with(num_blocks=8)
    request = engine.submit([1] * 20, greedy(None))
    finish(engine)
    assert request.finish_reason is FinishReason.LENGTH and len(request.tokens) == 33


def test_h52_the_context_limit_is_named_with_all_numbers() -> None:
    engine = engine_with(num_blocks=600, max_model_len=2048)
    with pytest.raises(RequestRefused, match=r"8 tokens.*2045.*2048") as refused:
        engine.submit([1] * 8, greedy(2045))
    assert refused.value.param == "max_tokens"
    with pytest.raises(RequestRefused, match=r"2048 tokens.*2048"):
        engine.submit([1] * 2048, greedy(None))
    with pytest.raises(RequestRefused, match="empty"):
        engine.submit([], greedy())


@pytest.mark.parametrize("bad", [24, -1, True, 1.5, "1", 10**20])
def test_h47_token_ids_outside_the_vocabulary_are_refused_by_field(bad: Any) -> None:
    engine = engine_with()
    with pytest.raises(RequestRefused, match=r"prompt: token id .* 0 to 23"):
        engine.submit([1, bad], greedy())
    if type(bad) is int:
        with pytest.raises(RequestRefused, match=r"stop_token_ids: .* 0 to 23"):
            engine.submit([1], greedy(stop_token_ids=[bad]))
        with pytest.raises(RequestRefused, match=r"logit_bias: .* 0 to 23"):
            engine.submit([1], greedy(logit_bias={bad: 1.0}))
    assert not engine.has_work


def test_an_empty_salt_and_a_live_id_are_refused() -> None:
    engine = engine_with()
    with pytest.raises(RequestRefused, match="cache_salt"):
        engine.submit([1], greedy(), cache_salt="")
    engine.submit([1], greedy(), request_id="mine")
    with pytest.raises(RequestRefused, match="'mine' is live"):
        engine.submit([1], greedy(), request_id="mine")
    finish(engine)
    engine.submit([1], greedy(), request_id="mine")


def test_a_stop_token_ends_a_request_and_min_tokens_delays_it() -> None:
    model = GhostModel()
    engine = engine_with()
    free = engine.submit([1, 2, 3], greedy(20))
    finish(engine)
    third = free.output[2]
    first = list(free.output).index(third)
    stopped = engine.submit([1, 2, 3], greedy(20, stop_token_ids=[third]))
    finish(engine)
    assert stopped.finish_reason is FinishReason.STOP and list(stopped.output) == list(free.output[: first + 1])
    delayed = engine.submit([1, 2, 3], greedy(20, stop_token_ids=[third], min_tokens=first + 1))
    finish(engine)
    assert list(delayed.output) == model.continuation(delayed) and delayed.num_output_tokens > first + 1


def test_h19_a_stop_token_inside_a_draft_ends_the_output_there() -> None:
    """H19: the rest of an accepted draft is dropped, and only what was given is counted."""

    class Accepting:
        def execute(self, batch: Any) -> list[Verdict]:
            return [Verdict([4, 5, 6]) if work.slice.num_draft else Verdict([3]) for work in batch.works]

        def forget(self, request: Any) -> None: ...

    class Fixed(GuessingSpeculator):
        def propose(self, requests: Any) -> Any:
            return {request.id: Draft((4, 5)) for request in requests}

    engine = engine_with()
    engine.executor, engine.speculator = Accepting(), Fixed(Fixed.Options(), engine.model)
    request = engine.submit([1, 2], greedy(20, stop_token_ids=[5]))
    outputs = list(engine.run())
    assert [list(output.tokens) for output in outputs] == [[3], [4, 5]]
    assert request.finish_reason is FinishReason.STOP and request.num_output_tokens == 3


def test_preempted_requests_go_to_the_head_of_the_queue_in_order_of_admission() -> None:
    class GivesUpTwo(SimpleScheduler):
        def schedule(self, plan: StepPlan) -> None:
            if len(plan.running) == 3 and not any(one.preemptions for one in plan.running):
                plan.preempt(plan.running[2])
                plan.preempt(plan.running[1])
            super().schedule(plan)

    engine = engine_with(scheduler=GivesUpTwo, max_num_seqs=3)
    names = [engine.submit([n, n], greedy(9)).id for n in range(5)]
    engine.step()
    engine.step()
    assert list(engine.waiting) == [names[1], names[2], names[3], names[4]] and engine.num_preemptions == 2
    finish(engine)


def test_h06_a_policy_may_evict_at_the_seat_limit() -> None:
    """H06: a scheduler that looks at priorities gives up a lower one; both are finished in the end."""

    class Priority(SimpleScheduler):
        def schedule(self, plan: StepPlan) -> None:
            best = min(plan.waiting, key=lambda one: one.priority, default=None)
            worst = max(plan.running, key=lambda one: one.priority, default=None)
            if best and worst and plan.seats_left == 0 and best.priority < worst.priority:
                plan.preempt(worst)
            for one in plan.running:
                plan.make_room_for(one)
            for one in sorted(plan.waiting, key=lambda one: one.priority):
                if not plan.include(one):
                    break

    engine = engine_with(scheduler=Priority, max_num_seqs=1)
    low = engine.submit([1, 2], greedy(12), priority=5)
    for _ in range(3):
        engine.step()
    high = engine.submit([3, 4], greedy(4), priority=0)
    while not high.finished:
        engine.step()
    assert not low.finished and low.preemptions == 1
    finish(engine)
    assert list(low.output) == GhostModel().continuation(low)


@pytest.mark.parametrize("name", ["continuous", "chunked"])
def test_h04_who_waits_for_something_else_costs_no_seat(name: str) -> None:
    """H04: those who wait for a block that another is computing hold no seat; admission goes on behind them."""
    scheduler, kv = Plugins().policy("scheduler", name), Plugins().policy("kv", "prefix")
    assert issubclass(scheduler, Scheduler) and issubclass(kv, KVManager)
    engine = engine_with(scheduler=scheduler, max_num_seqs=2)
    engine.kv = kv(kv.Options(block_size=4), 80)  # type: ignore[call-arg]
    leader = engine.submit([1] * 12, greedy(4))
    waiting = [engine.submit([1] * 12, greedy(2)) for _ in range(2)]
    behind = engine.submit([2] * 5, greedy(2))
    engine.step()
    assert list(engine.running) == [leader.id, behind.id]
    finish(engine)
    assert all(request.cached_tokens == 8 and request.num_output_tokens == 2 for request in waiting)


def test_a_scheduler_that_plans_nothing_stalls_with_reasons() -> None:
    class Lazy(Scheduler):
        name = "lazy"

        def schedule(self, plan: StepPlan) -> None:
            plan.include(plan.waiting[0], at_most=0)

    engine = engine_with(scheduler=Lazy)
    request = engine.submit([1], greedy())
    with pytest.raises(Stalled, match=r"'lazy' planned nothing though 0 requests run and 1 wait.*req-0"):
        engine.step()
    outputs = engine.recover(Stalled("lazy"))
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] and request.error == "Stalled: lazy"
    check_idle(engine)


def test_recover_ends_those_in_the_failed_step_and_keeps_the_others() -> None:
    engine = engine_with(max_num_seqs=1)
    held, waiting = engine.submit([1, 2], greedy(4)), engine.submit([3, 4], greedy(4))
    execute = engine.executor.execute
    engine.executor.execute = lambda batch: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError) as raised:
        engine.step()
    assert [output.request for output in engine.recover(raised.value)] == [held]
    engine.executor.execute = execute  # type: ignore[method-assign]
    finish(engine)
    assert held.finish_reason is FinishReason.ERROR and "ZeroDivisionError" in str(held.error)
    assert waiting.num_output_tokens == 4 and engine.num_failed == 1


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_recover_from_a_scheduler_that_raises_half_way(after: int) -> None:
    """Wherever `schedule` raises, no slot leaks and the engine gets on."""

    class Breaks(SimpleScheduler):
        broken = True

        def schedule(self, plan: StepPlan) -> None:
            for number, one in enumerate([*plan.running, *plan.waiting]):
                if self.broken and number == after and plan.running:
                    if number == 1:
                        plan.preempt(plan.running[0])
                    raise ValueError("planted")
                plan.include(one)

    engine = engine_with(scheduler=Breaks)
    requests = [engine.submit([n, n + 1], greedy(5)) for n in range(2)]
    engine.step()
    requests += [engine.submit([n, n + 2], greedy(5)) for n in range(2)]
    with pytest.raises(ValueError, match="planted") as raised:
        engine.step()
    assert engine.recover(raised.value)
    assert isinstance(engine.scheduler, Breaks)
    engine.scheduler.broken = False
    finish(engine)
    for request in requests:
        assert request.finished
        if request.finish_reason is FinishReason.LENGTH:
            assert list(request.output) == GhostModel().continuation(request)


def test_h50_an_error_of_one_request_leaves_the_others_alone() -> None:
    """H50: a verdict with an error ends that request; its neighbours go on and a counter moves."""
    engine = engine_with()
    good, bad = engine.submit([1, 2, 3], greedy(5)), engine.submit([4, 5, 6], greedy(5))
    execute, discarded = engine.executor.execute, []

    def planted(batch: Any) -> Any:
        verdicts = execute(batch)
        for index, work in enumerate(batch.works):
            if work.slice.request is bad and bad.num_output_tokens == 2:
                verdicts[index] = Verdict(error="the logits are not numbers")
        return verdicts

    engine.executor.execute = planted  # type: ignore[method-assign]
    discard = engine.kv.discard
    engine.kv.discard = lambda request: (discarded.append(request), discard(request))[1]  # type: ignore[method-assign, func-returns-value]
    outputs = list(engine.run())
    assert [output.error for output in outputs if output.request is bad][-1] == "the logits are not numbers"
    assert bad.finish_reason is FinishReason.ERROR and discarded == [bad] and engine.num_failed == 1
    assert list(good.output) == GhostModel().continuation(good)


@pytest.mark.parametrize(("tokens", "message"), [((99,), "outside the vocabulary of 24"), ((-1,), "outside")])
def test_a_speculator_that_proposes_no_token_is_named(tokens: tuple[int, ...], message: str) -> None:
    class Wild(GuessingSpeculator):
        name = "wild"

        def propose(self, requests: Any) -> Any:
            return {request.id: Draft(tokens) for request in requests}

    engine = engine_with()
    engine.speculator = Wild(Wild.Options(), engine.model)
    engine.submit([1], greedy())
    with pytest.raises(PolicyError, match=f"'wild' .*{message}"):
        engine.step()


def test_a_draft_is_cut_to_max_draft_and_to_the_room_left() -> None:
    class Long(GuessingSpeculator):
        max_draft = 2

        def propose(self, requests: Any) -> Any:
            return {request.id: Draft((1,) * 9) for request in requests}

    engine = engine_with()
    engine.speculator = Long(Long.Options(), engine.model)
    request = engine.submit([1, 2], greedy(4))
    engine.step()
    assert request.draft == Draft((1, 1))
    while request.num_output_tokens < 2:
        engine.step()
    assert not request.finished and len(request.draft or ()) <= request.draft_room
    finish(engine)


def test_seeds_are_the_clients_or_the_engines() -> None:
    first, second = engine_with(), engine_with()
    seeds = [[engine.submit([1], SamplingParams()).seed for _ in range(3)] for engine in (first, second)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3
    assert first.submit([1], SamplingParams(seed=-5)).seed == 2**64 - 5


def test_the_engine_knows_no_policy_by_name() -> None:
    """Core imports no policy, and what an author needs is imported without torch."""
    import subprocess
    import sys

    code = (
        "import sys, swapserve, swapserve.testing;"
        "print([name for name in sys.modules if name == 'torch' or name.startswith('swapserve_')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_custom_manager_needs_four_methods_only() -> None:
    assert KVManager.__abstractmethods__ == {"fits", "reserve", "table", "free", "usage"}
