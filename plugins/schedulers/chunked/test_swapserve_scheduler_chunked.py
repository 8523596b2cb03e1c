"""The contract of every scheduler, for `chunked`, and what is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swapserve_scheduler_chunked import Chunked

from swapserve import Draft, PolicyOptions, Request, Speculator
from swapserve.testing import SchedulerContract, ghost_info, greedy


class TestChunked(SchedulerContract):
    policy = Chunked


class TestChunkedInSmallPieces(SchedulerContract):
    policy = Chunked
    options = {"chunk_size": 7}


class TestChunkedWithShortPieces(SchedulerContract):
    policy = Chunked
    options = {"long_prefill_token_threshold": 3}


def test_decodes_go_first_and_prompts_get_what_is_left() -> None:
    info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    contract = TestChunkedInSmallPieces()
    engine = contract.engine(info, 60)
    decoding = engine.submit([1, 2], greedy(20))
    engine.step()
    prompt = engine.submit([3] * 20, greedy(2))
    pieces = []
    while not pieces or prompt.prefilling:
        engine.step()
        assert engine.last_plan is not None
        slices = engine.last_plan.slices
        pieces.append((slices[decoding.id].count, slices[prompt.id].count))
    assert pieces == [(1, 6), (1, 6), (1, 6), (1, 2)]


def test_one_prompt_takes_no_more_than_its_threshold() -> None:
    info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    engine = TestChunkedWithShortPieces().engine(info, 60)
    both = [engine.submit([n] * 8, greedy(2)) for n in (1, 2)]
    engine.step()
    assert [request.computed for request in both] == [3, 3]


class Eager(Speculator):
    """Always proposes three tokens."""

    name = "eager"
    max_draft = 3

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        return {request.id: Draft((0, 0, 0)) for request in requests}


def test_drafts_take_only_what_leaves_a_token_for_everyone() -> None:
    """Three that decode with drafts of three want 12 tokens of 7: the prompt behind them is let in and grows."""
    info = ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    engine = TestChunkedInSmallPieces().engine(info, 60)
    engine.speculator = Eager(PolicyOptions(), info)
    decoding = [engine.submit([n, n], greedy(40)) for n in (1, 2, 3)]
    engine.step()
    prompt = engine.submit([4] * 20, greedy(2))
    counts = []
    while not counts or prompt.prefilling:
        engine.step()
        assert engine.last_plan is not None
        counts.append([piece.count for piece in engine.last_plan.slices.values()])
    # With the prompt in the queue, then with the prompt in pieces of what the drafts must leave.
    assert counts[0] == [4, 1, 1, 1] and all(len(step) == 4 and step[-1] >= 1 for step in counts)
    assert list(engine.last_plan.slices) == [request.id for request in (*decoding, prompt)]


def test_no_more_run_than_the_chunk_has_tokens() -> None:
    """With a chunk of seven and 32 seats: whoever is let in gets on in every step, and the oldest first."""
    info = ghost_info(max_num_seqs=32, max_num_batched_tokens=64, max_model_len=64)
    engine = TestChunkedInSmallPieces().engine(info, 200)
    requests = [engine.submit([n] * (1 + n % 3), greedy(5)) for n in range(24)]
    most = 0
    while engine.has_work:
        decoding = [request.id for request in engine.running.values() if not request.prefilling]
        engine.step()
        most = max(most, len(engine.running))
        assert engine.last_plan is not None and set(decoding) <= engine.last_plan.slices.keys()
    assert most == 7 and all(request.num_output_tokens == 5 for request in requests)


def test_no_one_overtakes_a_request_that_has_no_room_yet() -> None:
    """Small requests that keep coming must not take, one by one, the room that a large one waits for."""
    engine = TestChunked().engine(ghost_info(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40), 10)
    running = engine.submit([1] * 8, greedy(8))
    engine.step()
    large = engine.submit([2] * 30, greedy(2))
    small = engine.submit([3] * 4, greedy(2))
    while not running.finished:
        engine.step()
        assert small.computed == 0 or large.computed, "a later request went first"
    engine.step()
    assert large.computed and small.finish_reason is None
