"""The KV pool's size follows the memory there is, and says what it is good for."""

from __future__ import annotations

import pytest

from swapserve import memory
from swapserve.memory import free_cpu_memory, size_pool
from swapserve.model import ModelError, load_model

LIMITS = dict(max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def llama(model_folder):
    return load_model(str(model_folder("llama")), device="cpu")


def test_bytes_given_outright(llama):
    a_block = 16 * llama.kv_bytes_per_token
    size = size_pool(llama, 16, kv_cache_memory_bytes=20 * a_block + 1, **LIMITS)
    assert (size.num_blocks, size.num_tokens, size.num_bytes) == (20, 320, 20 * a_block)
    assert size.num_longest_requests == 320 / 256 and size.warning is None


def test_no_more_than_the_most_requests_of_the_greatest_length_need(llama):
    assert size_pool(llama, 16, kv_cache_memory_bytes=1 << 40, **LIMITS).num_blocks == 4 * 256 // 16


def test_half_of_the_free_memory_of_a_cpu_at_most(llama, monkeypatch):
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 10 * 16 * llama.kv_bytes_per_token)
    assert size_pool(llama, 16, **LIMITS).num_blocks == 5
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 1 << 50)
    many = size_pool(llama, 16, max_num_seqs=1 << 30, max_num_batched_tokens=64)
    assert many.num_bytes <= memory.CPU_MOST_BYTES < many.num_bytes + 16 * llama.kv_bytes_per_token


def test_too_little_for_the_greatest_length_is_said_and_too_little_for_a_block_refused(llama):
    size = size_pool(llama, 16, kv_cache_memory_bytes=2 * 16 * llama.kv_bytes_per_token, **LIMITS)
    assert size.warning is not None and "--max-model-len" in size.warning and "32 tokens" in size.warning
    with pytest.raises(ModelError, match="not one KV block of 16 tokens"):
        size_pool(llama, 16, kv_cache_memory_bytes=100, **LIMITS)


def test_free_memory_is_some_of_this_machine():
    assert 1 << 20 < free_cpu_memory() < 1 << 50
