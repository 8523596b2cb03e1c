"""The contract of every scheduler, for `static`, and what is its own."""

from __future__ import annotations

from swapserve_scheduler_static import Static

from swapserve.testing import SchedulerContract, ghost_info, greedy


class TestStatic(SchedulerContract):
    policy = Static


def test_no_one_joins_until_the_whole_batch_is_done() -> None:
    engine = TestStatic().engine(ghost_info(max_num_seqs=3, max_model_len=40), 60)
    requests = [engine.submit([n, n], greedy(n + 1)) for n in range(6)]
    together = []
    while engine.has_work:
        engine.step()
        assert engine.last_plan is not None
        together.append([request.id for request in requests if request.id in engine.last_plan.slices])
    names = [request.id for request in requests]
    assert together[:3] == [names[0:3], names[1:3], names[2:3]]
    assert together[3:] == [names[3:6]] * 4 + [names[4:6], names[5:6]]


def test_the_batch_size_is_an_option() -> None:
    engine = TestStatic().engine(ghost_info(max_num_seqs=8), 60)
    engine.scheduler = Static(Static.Options(batch_size=2))
    for n in range(5):
        engine.submit([n], greedy(2))
    engine.step()
    assert len(engine.running) == 2
