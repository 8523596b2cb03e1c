"""The contract of every scheduler, for `continuous`, and what is its own."""

from __future__ import annotations

from swapserve_scheduler_continuous import Continuous

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
