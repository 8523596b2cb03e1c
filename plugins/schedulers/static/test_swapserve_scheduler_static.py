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


def test_a_batch_is_filled_over_several_steps_before_anyone_decodes() -> None:
    engine = TestStatic().engine(ghost_info(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=40), 60)
    requests = [engine.submit([n] * 9, greedy(3)) for n in range(6)]
    sizes = []
    while not requests[3].finished:
        engine.step()
        assert engine.last_plan is not None
        sizes.append([piece.count for piece in engine.last_plan.slices.values()])
    assert sizes == [[9, 9], [9, 9], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_the_batch_size_is_an_option() -> None:
    engine = TestStatic().engine(ghost_info(max_num_seqs=8), 60)
    engine.scheduler = Static(Static.Options(batch_size=2))
    for n in range(5):
        engine.submit([n], greedy(2))
    engine.step()
    assert len(engine.running) == 2


def test_a_preempted_request_comes_back_with_the_next_batch() -> None:
    engine = TestStatic().engine(ghost_info(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=32), 9)
    older, short, younger, fourth = (engine.submit([n] * 8, greedy(m)) for n, m in ((1, 20), (2, 7), (3, 8), (4, 1)))
    while not short.finished:
        engine.step()
    assert younger.preemptions == 1 and engine.kv.fits(younger, 0, len(younger.tokens))
    while not older.finished:
        assert list(engine.running) == [older.id], "someone joined a batch that was not done"
        engine.step()
    engine.step()
    assert list(engine.running) == [younger.id] and fourth.finished
