"""The plan: budgets, seats, slots and their undoing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest

from swapserve import Draft, Limits, PolicyError, Refusal, Request, StepPlan
from swapserve.plan import WaitingView
from swapserve.testing import greedy
from swapserve.testing.simple import SimpleKV


def request(name: str, length: int, max_len: int = 60) -> Request:
    return Request(name, tuple(range(1, length + 1)), greedy(), max_len=max_len)


def plan_of(
    waiting: Sequence[Request] = (),
    running: Sequence[Request] = (),
    blocks: int = 20,
    seats: int = 4,
    tokens: int = 32,
) -> StepPlan:
    kv = SimpleKV(SimpleKV.Options(block_size=4), blocks * 4)
    for one in running:
        assert kv.reserve(one, 0, max(one.computed, 1))
    return StepPlan(
        OrderedDict((one.id, one) for one in waiting),
        {one.id: one for one in running},
        kv,
        Limits(seats, tokens, 64),
        now=0.0,
    )


def decoding(name: str, length: int, draft: int = 0) -> Request:
    one = request(name, length)
    one.computed = length - 1
    one.draft = Draft(tuple(range(draft))) if draft else None
    return one


def test_include_takes_all_pending_tokens_or_nothing() -> None:
    small, large = request("small", 10), request("large", 30)
    plan = plan_of([small, large])
    assert plan.include(small).tokens == 10 and plan.tokens_left == 22
    refused = plan.include(large)
    assert not refused and refused.refused is Refusal.TOKENS
    assert plan.tokens_left == 22 and "large" not in plan.slices and large.computed == 0
    assert plan.refusals == {"large": Refusal.TOKENS}


def test_include_in_pieces() -> None:
    one = request("one", 30)
    plan = plan_of([one])
    assert plan.include(one, at_most=7).tokens == 7
    assert plan.slices["one"].end == 7 and not plan.slices["one"].samples


def test_a_piece_is_cut_to_the_tokens_left() -> None:
    first, second = request("first", 30), request("second", 30)
    plan = plan_of([first, second])
    plan.include(first)
    assert plan.include(second, at_most=10).tokens == 2 and plan.tokens_left == 0


def test_seats() -> None:
    requests = [request(name, 2) for name in "abc"]
    plan = plan_of(requests, seats=2)
    assert [plan.include(one).refused for one in requests] == [None, None, Refusal.SEATS]


def test_slots() -> None:
    first, second = request("first", 16), request("second", 5)
    plan = plan_of([first, second], blocks=5)
    assert plan.include(first)
    assert plan.fits(second) is False
    assert plan.include(second).refused is Refusal.SLOTS
    assert plan.tokens_left == 16


def test_slots_are_held_for_the_whole_prompt_from_the_first_piece() -> None:
    first, second = request("first", 16), request("second", 8)
    plan = plan_of([first, second], blocks=5)
    assert plan.include(first, at_most=4).tokens == 4
    assert plan.include(second).refused is Refusal.SLOTS


def test_no_one_is_included_twice_and_no_stranger() -> None:
    one = request("one", 4)
    plan = plan_of([one])
    plan.include(one)
    with pytest.raises(PolicyError, match="once"):
        plan.include(one)
    with pytest.raises(PolicyError, match="neither waits nor runs"):
        plan.include(request("stranger", 4))


def test_preempt_gives_everything_back_and_closes_admission() -> None:
    running, waiting = decoding("running", 12, draft=2), request("waiting", 4)
    plan = plan_of([waiting], [running])
    plan.include(running)
    plan.preempt(running)
    assert plan.tokens_left == 32 and not plan.slices and running.computed == 0 and running.draft is None
    assert running.preemptions == 1
    assert plan.include(waiting).refused is Refusal.CLOSED and plan.include(running).refused is Refusal.CLOSED
    assert not plan.fits(waiting)
    with pytest.raises(PolicyError, match="given up already"):
        plan.preempt(running)
    with pytest.raises(PolicyError, match="does not run"):
        plan.preempt(waiting)


def test_an_admission_can_be_undone() -> None:
    one = request("one", 8)
    plan = plan_of([one])
    plan.include(one)
    plan.preempt(one)
    assert plan.admitted == [] and plan.tokens_left == 32 and one.preemptions == 0


def test_a_draft_that_does_not_fit_the_tokens_is_left_out() -> None:
    one = decoding("one", 8, draft=3)
    plan = plan_of(running=[one], tokens=2)
    assert plan.include(one).tokens == 1 and plan.slices["one"].num_draft == 0


def test_a_draft_that_does_not_fit_the_slots_is_left_out() -> None:
    one = decoding("one", 8, draft=3)
    plan = plan_of(running=[one], blocks=2)
    assert plan.include(one).tokens == 1 and plan.slices["one"].num_draft == 0


def test_drafts_are_dropped_before_anyone_is_given_up() -> None:
    first, second = decoding("first", 8, draft=3), decoding("second", 9)
    plan = plan_of(running=[first, second], blocks=5)
    second.computed = 8
    assert plan.include(first).tokens == 4
    assert plan.make_room_for(second).tokens == 1
    assert plan.preempted == [] and plan.slices["first"].num_draft == 0 and plan.tokens_left == 30


def test_make_room_gives_up_the_newest_and_never_an_older_one() -> None:
    running = [decoding(name, 9) for name in ("old", "middle", "new")]
    plan = plan_of(running=running, blocks=7)
    assert [bool(plan.make_room_for(one)) for one in running] == [True, True, False]
    assert [one.id for one in plan.preempted] == ["new"]
    running = [decoding(name, 9) for name in ("old", "new")]
    plan = plan_of(running=running, blocks=4)
    assert plan.make_room_for(running[1]).refused is Refusal.SLOTS
    assert [one.id for one in plan.preempted] == ["new"] and plan.make_room_for(running[0])


def test_a_preempted_request_may_come_back_in_pieces() -> None:
    one = request("one", 50)
    one.preemptions = 1
    plan = plan_of([one])
    assert plan.include(one).tokens == 32


def test_a_manager_that_claims_the_last_token_is_named() -> None:
    class Greedy(SimpleKV):
        name = "greedy"

        def lookup(self, request: Request) -> int:
            return len(request.tokens)

    one = request("one", 8)
    kv = Greedy(Greedy.Options(block_size=4), 80)
    plan = StepPlan(OrderedDict(one=one), {}, kv, Limits(4, 32, 64), 0.0)
    with pytest.raises(PolicyError, match="'greedy': lookup said 8 of 8"):
        plan.include(one)


def test_the_view_of_the_queue() -> None:
    queue = OrderedDict((str(n), request(str(n), 2)) for n in range(5))
    view = WaitingView(queue)
    assert len(view) == 5 and view[0].id == "0" and view[-1].id == "4" and view[3].id == "3"
    assert [one.id for one in view[1:3]] == ["1", "2"] and [one.id for one in view[::-1]] == list("43210")
    assert queue["2"] in view and request("2", 2) not in view and "2" not in view
    for index in (5, -6):
        with pytest.raises(IndexError, match="5 requests"):
            view[index]
