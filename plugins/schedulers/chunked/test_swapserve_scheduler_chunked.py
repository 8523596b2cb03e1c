"""The contract of every scheduler, for `chunked`, and what is its own."""

from __future__ import annotations

from swapserve_scheduler_chunked import Chunked

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
