"""The CPU backend where numba can keep no compiled code, as in a container whose file system is read-only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="numba is not installed")

CODE = """
import torch
from numba.core.caching import CacheImpl, CompileResultCacheImpl
if {readonly}:
    CompileResultCacheImpl._locator_classes = CacheImpl._locator_classes = []
import swapserve_kernels.cpu_numba as engine
from swapserve_kernels import get_backend
backend = get_backend("cpu", "cpu")
cache = backend.allocate(1, 4, 1, 8, torch.float32, "cpu")
backend.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, torch.tensor([2]))
print(backend.engine, engine.KEEP_CODE, float(cache.k.sum()))
"""


@pytest.mark.parametrize("readonly", [False, True])
def test_without_a_cache_folder_it_compiles_anew_and_says_so(readonly: bool) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE.format(readonly=readonly)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["numba", str(not readonly), "8.0"]
    assert ("numba can write to no cache folder" in done.stderr) == readonly
