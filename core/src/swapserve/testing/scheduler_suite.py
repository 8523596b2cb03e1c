"""The contract of a scheduler, as tests to inherit.

class TestMine(SchedulerContract):
    policy = MyScheduler
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from swapserve.engine import Engine, Stalled
from swapserve.no_speculation import NoSpeculation
from swapserve.plan import StepPlan, WaitingView
from swapserve.policies import ModelInfo, Scheduler
from swapserve.request import FinishReason, Request, RequestRefused
from swapserve.testing.driver import Combination, Driver
from swapserve.testing.ghost import GhostExecutor, GhostModel, ghost_info, greedy
from swapserve.testing.simple import SimpleKV, combinations
from swapserve.testing.soundness import check_engine, check_idle
from swapserve.testing.workloads import make_workload
from swapserve.testing.wrappers import RefusingKV, WatchedKV, WatchedScheduler, WatchedSpeculator


class CountingView(WaitingView):
    """The queue, counting how many requests were read from it."""

    def __init__(self, queue: OrderedDict[str, Request]) -> None:
        super().__init__(queue)
        self.num_read = 0

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            self.num_read += 1
            yield request

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, tuple) else 1
        return found


class SchedulerContract:
    """What every scheduler must do, whatever it is combined with."""

    policy: ClassVar[type[Scheduler]]
    options: ClassVar[dict[str, Any]] = {}
    num_workloads: ClassVar[int] = 60

    def scheduler(self) -> Scheduler:
        return self.policy(self.policy.Options(**self.options))

    def engine(self, info: ModelInfo, num_blocks: int, block_size: int = 4) -> Engine:
        """The scheduler on the ghost with plain paged slots and no drafts."""
        return Engine(
            executor=GhostExecutor(num_blocks, block_size),
            scheduler=self.scheduler(),
            kv=SimpleKV(SimpleKV.Options(block_size=block_size), num_blocks * block_size),
            speculator=NoSpeculation(NoSpeculation.Options(), info),
            model=info,
        )

    def finish(self, engine: Engine, max_steps: int = 500) -> int:
        """Step until idle; returns the number of steps."""
        steps = 0
        while engine.has_work:
            engine.step()
            check_engine(engine)
            steps += 1
            assert steps < max_steps, f"{self.policy.name} does not come to an end"
        check_idle(engine)
        return steps

    def test_every_partner_gives_the_same_tokens(self) -> None:
        """With every installed KV manager and speculator: the ghost's own answers, no leak, no stall."""
        for seed in range(self.num_workloads):
            for combination in combinations("scheduler", self.policy, self.options, seed):
                workload = make_workload(seed)
                try:
                    Driver(combination.engine(workload), workload).run()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, {combination}: {error}") from error

    def test_writes_to_no_request(self) -> None:
        for seed in range(self.num_workloads):
            workload = make_workload(seed)
            combination = next(combinations("scheduler", self.policy, self.options, seed))
            engine = combination.engine(workload, WatchedKV)
            engine.scheduler = WatchedScheduler(engine.scheduler)
            engine.speculator = WatchedSpeculator(engine.speculator)
            Driver(engine, workload).run()

    def test_copes_with_refusals_at_random(self) -> None:
        """A KV manager that says no now and then costs time, never tokens or slots."""
        for seed in range(self.num_workloads):
            workload = make_workload(seed)
            combination = next(combinations("scheduler", self.policy, self.options, seed))
            engine = combination.engine(workload, lambda kv, seed=seed: RefusingKV(kv, seed))  # type: ignore[misc]
            driver = Driver(engine, workload)
            inner = engine.step

            def patient_step(inner: Any = inner, engine: Engine = engine) -> Any:
                try:
                    return inner()
                except Stalled:
                    return []

            driver.step_engine = patient_step
            inner_kv = engine.kv
            assert isinstance(inner_kv, RefusingKV)
            driver.run(before_idle=inner_kv.relent)

    def test_nobody_starves_while_others_finish(self) -> None:
        """A request is done before sixty that came after it, though new ones never stop coming."""
        for num_seqs in (1, 3):
            info = ghost_info(max_num_seqs=num_seqs, max_num_batched_tokens=24, max_model_len=40)
            engine = self.engine(info, 24)
            for _ in range(2 * num_seqs):
                engine.submit([1, 2, 3], greedy(3))
            chosen = engine.submit([4] * 20, greedy(6))
            later = []
            while not chosen.finished:
                while len(engine.waiting) < 4 * num_seqs:
                    later.append(engine.submit([5, 6, 7], greedy(3)))
                engine.step()
                done = sum(request.finished for request in later)
                assert done < 60, f"{self.policy.name}: {done} later requests are done and an earlier one is not"

    def test_every_running_request_gets_on(self) -> None:
        """With room for everyone, nobody who runs is left out for longer than the others take to finish."""
        info = ghost_info(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=60)
        engine = self.engine(info, 100)
        idle: dict[str, int] = {}
        rng = random.Random(1)
        submitted = 0
        while engine.has_work or submitted < 60:
            while submitted < 60 and len(engine.waiting) < 4:
                engine.submit([rng.randrange(24) for _ in range(rng.randint(1, 12))], greedy(rng.randint(2, 8)))
                submitted += 1
            engine.step()
            assert engine.last_plan is not None
            for request_id in engine.running:
                idle[request_id] = 0 if request_id in engine.last_plan.slices else idle.get(request_id, 0) + 1
                assert idle[request_id] < 20, f"{self.policy.name}: {request_id} holds a seat and gets nothing"

    def test_a_step_reads_a_batch_of_the_queue_at_most(self) -> None:
        """With 5,000 waiting a step looks at no more of them than a few batches' worth."""
        info = ghost_info(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40)
        engine = self.engine(info, 12)
        for _ in range(5000):
            engine.submit([1] * 10, greedy(4))
        scheduler, views = engine.scheduler, []

        class Counted(Scheduler):
            name = scheduler.name
            splits_prompts = scheduler.splits_prompts

            def schedule(self, plan: StepPlan) -> None:
                view = plan.waiting = CountingView(engine.waiting)
                scheduler.schedule(plan)
                views.append(view.num_read)

        engine.scheduler = Counted(scheduler.options)
        for _ in range(30):
            engine.step()
        assert max(views) <= 10 * info.max_num_seqs, f"{self.policy.name} read {max(views)} of the queue in one step"

    def test_h05_two_that_each_hold_half_the_pool(self) -> None:
        """H05: both need one more block; one is given up and finishes later, with progress in every step."""
        info = ghost_info(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
        engine = self.engine(info, 8)
        both = [engine.submit([n] * 14, greedy(16)) for n in (1, 2)]
        while engine.has_work:
            before = sum(len(request.tokens) for request in both)
            computed = sum(request.computed for request in both)
            engine.step()
            check_engine(engine)
            moved = sum(len(request.tokens) for request in both) > before
            assert moved or sum(request.computed for request in both) != computed, "a step without progress"
        assert all(request.finish_reason is FinishReason.LENGTH for request in both)
        assert sum(request.preemptions for request in both) <= 2
        check_idle(engine)

    def test_h03_the_next_request_is_admitted_when_one_leaves(self) -> None:
        """H03: a request that waits for room is cancelled; the one behind it runs in the next step."""
        info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40)
        engine = self.engine(info, 8)
        first = engine.submit([1] * 18, greedy(2))
        big = engine.submit([2] * 30, greedy(2))
        small = engine.submit([3] * 4, greedy(2))
        engine.step()
        assert engine.abort(big.id) is not None
        self.finish(engine)
        assert first.finish_reason is small.finish_reason is FinishReason.LENGTH

    def test_h06_preempted_and_aborted_between_two_steps(self) -> None:
        """H06: a request that was just given up may end before it comes back."""
        info = ghost_info(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
        engine = self.engine(info, 8)
        both = [engine.submit([n] * 14, greedy(16)) for n in (1, 2)]
        while not engine.num_preemptions:
            engine.step()
        victim = next(request for request in both if request.preemptions)
        assert engine.abort(victim.id) is not None
        self.finish(engine)
        assert victim.finish_reason is FinishReason.ABORT

    def test_h16_abort_at_every_stage(self) -> None:
        """H16: waiting, between chunks, decoding, twice, unknown: slots come back and there is one final record."""
        model = GhostModel()
        for stage in range(12):
            info = ghost_info(model, max_num_seqs=2, max_num_batched_tokens=20, max_model_len=40)
            engine = self.engine(info, 20)
            requests = [engine.submit([n] * 18, greedy(6)) for n in (1, 2, 3)]
            for _ in range(stage):
                engine.step()
            leaving = requests[stage % 3]
            was_finished = leaving.finished
            final = engine.abort(leaving.id)
            assert (final is None) == was_finished
            assert engine.abort(leaving.id) is None and engine.abort("never seen") is None
            check_engine(engine)
            self.finish(engine)
            for request in requests:
                if request.finish_reason is not FinishReason.ABORT:
                    assert list(request.output) == model.continuation(request)

    def test_h29_no_step_is_larger_than_its_budget(self) -> None:
        """H29: a prompt longer than a step is refused with both numbers, or served in pieces; never overrun."""
        info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
        engine = self.engine(info, 80)
        served = [engine.submit([1] * 64, greedy(3)), engine.submit([2] * 10, greedy(3))]
        if self.policy.splits_prompts:
            served.append(engine.submit([3] * 65, greedy(3)))
        else:
            with pytest.raises(RequestRefused, match=r"65 .*64.*--max-num-batched-tokens"):
                engine.submit([3] * 65, greedy(3))
        while engine.has_work:
            engine.step()
            assert engine.last_plan is not None
            assert sum(piece.count for piece in engine.last_plan.slices.values()) <= 64
        assert all(request.num_output_tokens == 3 for request in served)

    def test_h29_a_preempted_request_that_outgrew_a_step_comes_back(self) -> None:
        """Recomputing prompt and output may take several steps, also under a scheduler that splits no prompts."""
        info = ghost_info(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=60)
        engine = self.engine(info, 16)
        requests = [engine.submit([n] * 7, greedy(40)) for n in (1, 2)]
        self.finish(engine)
        assert max(request.preemptions for request in requests) > 0
        assert all(request.num_output_tokens == 40 for request in requests)

    def test_h30_a_preempted_long_prompt_is_not_let_in_for_one_piece(self) -> None:
        """H30: B waits until all of it fits, instead of being thrown out again and again."""

        def play(num_blocks: int) -> tuple[int, Request, int]:
            info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=80)
            engine = self.engine(info, num_blocks)
            engine.submit([1] * 36, greedy(24))
            for _ in range(4):
                engine.step()
            second = engine.submit([2] * 48, greedy(4))
            computed = 0
            executor = engine.executor
            assert isinstance(executor, GhostExecutor)
            steps = self.finish(engine)
            computed = executor.num_computed
            return steps, second, computed

        tight_steps, second, tight_computed = play(16)
        ample_steps, _, ample_computed = play(100)
        assert second.preemptions <= 1
        assert tight_computed - ample_computed <= len(second.prompt) + second.num_output_tokens
        assert tight_steps <= 2 * ample_steps + 24

    def test_combination_is_named(self) -> None:
        """The scheduler has a name and options with defaults that are valid on their own."""
        assert self.policy.name and "," not in self.policy.name and "=" not in self.policy.name
        assert isinstance(self.scheduler().options, self.policy.Options)
        assert str(Combination(self.policy, SimpleKV, NoSpeculation)).startswith(self.policy.name)
