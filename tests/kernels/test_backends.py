"""Choosing a backend: names, what suits a device, and sentences for what cannot run."""

from __future__ import annotations

import logging

import pytest
import torch

from swapserve_kernels import NAMES, BackendUnavailable, cpu, get_backend
from swapserve_kernels.cpu import CpuBackend


def test_the_names() -> None:
    assert NAMES == ("reference", "cpu", "triton")
    for name in ("reference", "cpu"):
        assert get_backend(name, "cpu").name == name


@pytest.mark.parametrize("name", [None, "auto"])
def test_what_suits_a_device(name: str | None) -> None:
    assert get_backend(name, "cpu").name == "cpu"
    assert get_backend(name, torch.device("meta")).name == "reference"


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="no attention backend 'cuda'; there are: reference, cpu, triton"):
        get_backend("cuda", "cpu")


def test_the_cpu_backend_refuses_another_device() -> None:
    with pytest.raises(BackendUnavailable, match="runs on a CPU, and the device is cuda:0"):
        get_backend("cpu", "cuda:0")


def test_an_unknown_engine_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="no CPU engine 'c'; there are: numba, torch"):
        CpuBackend("c")


def test_without_numba_torch_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "numba", None)
    with caplog.at_level(logging.WARNING):
        assert CpuBackend().engine == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "numba is not installed, so decoding runs in torch, slower: install swapserve-kernels[cpu]"
    ]
    with pytest.raises(ValueError, match="needs numba: install"):
        CpuBackend("numba")


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_an_empty_cache_has_the_shape_asked_for(name: str) -> None:
    kv = get_backend(name, "cpu").allocate(5, 16, 2, 24, torch.bfloat16, "cpu")
    for cache in (kv.k, kv.v):
        assert cache.shape == (5, 16, 2, 24) and cache.dtype == torch.bfloat16 and cache.stride(3) == 1
        assert cache.eq(0).all()
    assert kv.page == 16


def test_a_cpu_cache_holds_a_heads_keys_side_by_side() -> None:
    kv = get_backend("cpu", "cpu").allocate(5, 16, 2, 24, torch.float32, "cpu")
    assert kv.k.stride() == (2 * 16 * 24, 24, 16 * 24, 1)
    assert kv.k.data_ptr() % 64 == 0 and kv.v.data_ptr() % 64 == 0
