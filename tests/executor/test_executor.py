"""What a batch may hold and what a step may touch."""

from __future__ import annotations

import pytest

from swapserve.batch import Batch, Slice, Work
from swapserve.engine import Engine
from swapserve.executor import TorchExecutor
from swapserve.memory import run_largest_step
from swapserve.model import load_model
from swapserve.params import SamplingParams
from swapserve.policies import ModelInfo, PolicyOptions, Speculator
from swapserve.request import Draft, FinishReason, Request
from swapserve.testing.simple import SimpleKV, SimpleScheduler


@pytest.fixture(scope="module")
def llama(model_folder):
    return load_model(str(model_folder("llama")), device="cpu")


def test_a_batch_of_nothing_and_one_of_another_block_size(llama):
    executor = TorchExecutor(llama, 4, 4)
    assert executor.execute(Batch([], 4)) == []
    request = Request("r", (1, 2, 3), SamplingParams(), max_len=9)
    with pytest.raises(ValueError, match="block size is 8 and the KV pool's 4"):
        executor.execute(Batch([Work(Slice(request, 0, 3), request.tokens, [0])], 8))


def test_the_largest_step_runs(llama):
    executor = run_largest_step(llama, max_num_seqs=3, max_num_batched_tokens=64)
    assert (executor.num_blocks, executor.block_size) == (3, 21)


def test_what_lies_in_blocks_of_others_or_past_the_length_does_not_matter(
    llama, transformers_tokens, greedy_requests, player
):
    executor = TorchExecutor(llama, 120, 4)
    for cache in executor._pool:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    requests, wanted = greedy_requests(24), transformers_tokens("llama", 24)
    player(executor, seed=4, max_draft=3).play(requests, wanted)
    assert [request.tokens for request in requests] == wanted


class Eager(Speculator):
    """Always proposes as many tokens as it may, mostly wrong ones."""

    name = "eager"
    max_draft = 5

    def propose(self, requests):
        return {request.id: Draft((3,) * self.max_draft) for request in requests}


@pytest.mark.parametrize(("max_tokens", "wanted"), [(None, 4), (2, 2)])
def test_h38_drafts_stop_at_the_context_limit(llama, max_tokens, wanted):
    executor = TorchExecutor(llama, 32, 4)
    info = ModelInfo("tiny", llama.vocab_size, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    kv, touched = SimpleKV(SimpleKV.Options(), 128), []
    plain = executor.execute

    def watched(batch):
        for work in batch.works:
            touched.append(work.slice.end)
            assert len(work.table) <= 16 and work.slice.end <= 64
            assert work.slice.num_draft <= work.slice.request.draft_room
        return plain(batch)

    executor.execute = watched
    engine = Engine(
        executor=executor,
        scheduler=SimpleScheduler(SimpleScheduler.Options()),
        kv=kv,
        speculator=Eager(PolicyOptions(), info),
        model=info,
    )
    request = engine.submit(list(range(2, 62)), SamplingParams(max_tokens=max_tokens, temperature=0.0))
    list(engine.run())
    assert request.num_output_tokens == wanted and request.finish_reason == FinishReason.LENGTH
    assert max(touched) <= 60 + wanted - 1  # the last token's own KV is of no use to anyone


def test_h39_logprobs_of_a_mixed_step_equal_those_alone(llama, transformers_tokens, prompts):
    """One step: a prompt's second chunk, a decode with 3 drafts of which 1 is right, and a plain decode."""
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    answers = transformers_tokens("llama", 24)

    def request(number: int) -> Request:
        return Request(f"r{number}", prompts[number], params, max_len=len(prompts[number]) + 24)

    def step(executor, *works):
        verdicts = executor.execute(Batch([Work(*work) for work in works], 4))
        for (piece, *_), verdict in zip(works, verdicts, strict=True):
            if piece.samples:
                piece.request.accept(verdict.tokens)
            else:
                piece.request.computed = piece.end
        return verdicts

    def alone(number: int, count: int) -> list:
        executor, one, got = TorchExecutor(llama, 20, 4), request(number), []
        while len(got) < count:
            piece = Slice(one, one.computed, one.pending)
            (verdict,) = step(executor, (piece, one.tokens[one.computed :], range(20)))
            got += verdict.logprobs
        return got

    executor = TorchExecutor(llama, 60, 4)
    half, drafted, decoding = request(5), request(4), request(3)
    tables = [range(0, 20), range(20, 40), range(40, 60)]
    step(
        executor,
        (Slice(half, 0, 20), half.tokens[:20], tables[0]),
        (Slice(drafted, 0, 29), drafted.tokens[:], tables[1]),
        (Slice(decoding, 0, 13), decoding.tokens[:], tables[2]),
    )
    right = answers[4][30]
    drafted.draft = Draft((right, (answers[4][31] + 1) % 96, 5))
    mixed = step(
        executor,
        (Slice(half, 20, 20), half.tokens[20:], tables[0]),
        (Slice(drafted, 29, 4), [*drafted.tokens[29:], *drafted.draft.tokens], tables[1]),
        (Slice(decoding, 13, 1), decoding.tokens[13:], tables[2]),
    )
    assert [len(verdict.tokens) for verdict in mixed] == [1, 2, 1]
    for verdict, wanted in zip(mixed, (alone(5, 1), alone(4, 3)[1:], alone(3, 2)[1:]), strict=True):
        for one, other in zip(verdict.logprobs, wanted, strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
