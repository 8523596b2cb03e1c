"""The Triton backend on machines without a GPU: it interprets in a process of its own, and else refuses to be made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swapserve_kernels import BackendUnavailable, get_backend

from .cases import ALL, CASES

pytest.importorskip("triton", reason="Triton is not installed")

FOLDER = Path(__file__).parent / "interpreted"
NUM_INTERPRETED = len(ALL) + len(CASES)
"""At least so many, most of them shared cases, unsplit and split: a run that collects too little must not pass."""
NUM_COMPILED = 18


def run_checks(file: str, num_checks: int, **environment: str) -> None:
    """Run a file of checks in a process whose Triton interprets, or has a stand-in driver, and nothing else."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", str(FOLDER / file), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command, env=inherited | {"OMP_NUM_THREADS": "1"} | environment, cwd=FOLDER.parents[2],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= num_checks, done.stdout
    assert not re.search(r"\d+ (skipped|xfailed|deselected)", done.stdout), done.stdout


def test_the_kernels_compute_the_definition_in_tritons_interpreter() -> None:
    run_checks("check_triton.py", NUM_INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="Triton's wheels bring no assembler here"
)
def test_the_launches_compile_for_gpus_that_are_not_here() -> None:
    run_checks("check_compiled.py", NUM_COMPILED)


def run_python(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match=r"'triton' needs a GPU, and the device is cpu: .* TRITON_INTERPRET=1"):
        get_backend("triton", "cpu")


def test_interpreting_must_be_asked_for_before_triton_is_imported() -> None:
    code = """
import os, triton
from swapserve_kernels import get_backend
os.environ["TRITON_INTERPRET"] = "1"
try:
    get_backend("triton", "cpu")
except RuntimeError as error:
    print(error)
"""
    assert "changed after Triton's import" in run_python(code)


def test_importing_the_package_imports_no_triton_kernel() -> None:
    """torch may import triton by itself; this package must not, since that import settles whether it interprets."""
    code = """
import sys, torch
before = "triton" in sys.modules
import swapserve_kernels, swapserve_kernels.triton_backend
print(before == ("triton" in sys.modules), "swapserve_kernels.triton_attention" in sys.modules)
"""
    assert run_python(code).split() == ["True", "False"]
