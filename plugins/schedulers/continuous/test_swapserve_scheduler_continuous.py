"""The contract of every scheduler, for `continuous`, and what is its own."""

from __future__ import annotations

from swapserve_scheduler_continuous import Continuous

from swapserve import Request
from swapserve.testing import SchedulerContract, ghost_info, greedy


class TestContinuous(SchedulerContract):
    policy = Continuous


def test_a_free_seat_is_taken_in_the_next_step() -> None:
    engine = TestContinuous().engine(ghost_info(max_num_seqs=2, max_model_len=40), 60)
    short, long, third = (engine.submit([n], greedy(n)) for n in (1, 6, 3))
    engine.step()
    assert short.finished and list(engine.running) == [long.id]
    engine.step()
    assert list(engine.running) == [long.id, third.id]


def test_with_every_seat_taken_no_one_is_looked_up_but_the_first() -> None:
    engine = TestContinuous().engine(ghost_info(max_num_seqs=2, max_model_len=40), 60)
    asked: list[str] = []

    def awaited(request: Request) -> str:
        asked.append(request.id)
        return running.id

    running, second = (engine.submit([n], greedy(9)) for n in range(2))
    engine.step()
    assert len(engine.running) == 2
    engine.kv.awaited = awaited  # type: ignore[method-assign]
    waiting = [engine.submit([n], greedy(1)) for n in range(3)]
    engine.step()
    assert asked == [] and engine.last_plan is not None and list(engine.last_plan.refusals) == [waiting[0].id]
    engine.abort(second.id)
    engine.step()
    assert asked == [request.id for request in waiting], "each could share with one that runs"


def test_no_one_overtakes_a_request_that_has_no_room_yet() -> None:
    """Small requests that keep coming must not take, one by one, the room that a large one waits for."""
    engine = TestContinuous().engine(ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40), 10)
    running = engine.submit([1] * 8, greedy(8))
    engine.step()
    large = engine.submit([2] * 30, greedy(2))
    small = engine.submit([3] * 4, greedy(2))
    while not running.finished:
        engine.step()
        assert small.computed == 0 or large.computed, "a later request went first"
    engine.step()
    assert large.computed and small.finish_reason is None
