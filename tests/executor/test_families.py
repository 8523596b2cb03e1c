"""Every family gives transformers' own greedy tokens, however its requests are cut, mixed and laid out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from swapserve.batch import Batch, Slice, Work
from swapserve.executor import TorchExecutor
from swapserve.model import load_model
from swapserve.params import SamplingParams
from swapserve.request import Request

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gemma3-one-kv-head", "granite"]
MIXES = {
    "pieces": dict(max_chunk=5),
    "drafts": dict(max_chunk=6, max_draft=4),
    "whole prompts and drafts": dict(max_chunk=64, max_draft=3),
}
NUM_NEW = 24


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(family, mix, model_folder, transformers_tokens, greedy_requests, player):
    executor = TorchExecutor(load_model(str(model_folder(family)), device="cpu"), num_blocks=120, block_size=4)
    wanted, requests = transformers_tokens(family, NUM_NEW), greedy_requests(NUM_NEW)
    player(executor, seed=11, **MIXES[mix]).play(requests, wanted)
    assert [request.tokens for request in requests] == wanted
    assert len({tuple(request.output) for request in requests}) > 3  # the model does not babble one answer to all


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_every_prompt_position_equal_those_of_transformers(family, model_folder, prompts):
    """Greedy tokens hardly feel a wrong scale or soft cap; these do."""
    prompt = prompts[-1]
    request = Request("r", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0), max_len=60)
    request.prompt_logprobs.append(None)
    executor, got = TorchExecutor(load_model(str(model_folder(family)), device="cpu"), 20, 4), []
    for start in range(0, len(prompt), 7):
        count = min(7, len(prompt) - start)
        work = Work(Slice(request, start, count), prompt[start : start + count], range(20))
        (verdict,) = executor.execute(Batch([work], 4))
        got += verdict.prompt_logprobs or ()
        request.prompt_logprobs[1:] = got
        request.computed = start + count
    model = AutoModelForCausalLM.from_pretrained(model_folder(family), attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [entry.token for entry in got] == list(prompt[1:])
    for place, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(wanted[place, entry.token]), abs=1e-4)


def test_h42_window_8_block_4_chunks_of_6_drafts_of_4_over_100_tokens(
    model_folder, transformers_tokens, greedy_requests, player
):
    executor = TorchExecutor(load_model(str(model_folder("gemma3")), device="cpu"), num_blocks=240, block_size=4)
    wanted, requests = transformers_tokens("gemma3", 100), greedy_requests(100)
    player(executor, seed=5, max_chunk=6, max_draft=4).play(requests, wanted)
    assert [request.tokens for request in requests] == wanted


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_size_does_not_matter(block_size, model_folder, transformers_tokens, greedy_requests, player):
    executor = TorchExecutor(load_model(str(model_folder("gemma2")), device="cpu"), 512 // block_size, block_size)
    wanted, requests = transformers_tokens("gemma2", NUM_NEW), greedy_requests(NUM_NEW)
    player(executor, seed=2, max_chunk=20).play(requests)
    assert [request.tokens for request in requests] == wanted


def test_bfloat16_runs_and_stays_close(model_folder, transformers_tokens, greedy_requests, player):
    model = load_model(str(model_folder("llama")), device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    executor = TorchExecutor(model, num_blocks=120, block_size=4)
    requests = greedy_requests(NUM_NEW)
    player(executor, seed=11).play(requests)
    pairs = list(zip(requests, transformers_tokens("llama", NUM_NEW), strict=True))
    same = [request.output[0] == tokens[len(request.prompt)] for request, tokens in pairs]
    assert sum(same) >= len(pairs) - 1
