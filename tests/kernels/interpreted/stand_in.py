"""A driver that names a GPU which is not there: real launches compile, down to machine code, and run nothing."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from swapserve_kernels import triton_backend
from swapserve_kernels.triton_backend import TritonBackend

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


@dataclass
class Driver:
    """What Triton asks of a driver before a launch."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device: one for each capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@dataclass(frozen=True)
class Build:
    """A compiled kernel and what its machine code tells of it."""

    kernel: str
    compiled: Any

    def code(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.compiled.asm["cubin"])
            file.flush()
            command = [os.path.join(TOOLS, "nvdisasm"), "-c", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @property
    def shared_bytes(self) -> int:
        return int(self.compiled.metadata.shared)


def count(instruction: str, code: str) -> int:
    return len(re.findall(rf"\b{instruction}", code))


def stand_in(capability: int) -> tuple[TritonBackend, list[Build]]:
    """A backend for a GPU of this capability on meta tensors, and the list that its launches' kernels are added to."""
    triton.runtime.driver.set_active(Driver(capability))
    builds: list[Build] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = real_run(kernel, *args, grid=grid, warmup=True, **options)
        if all(build.compiled is not compiled for build in builds):
            builds.append(Build(kernel.__name__, compiled))
        return compiled

    mock.patch.object(JITFunction, "run", compile_only).start()
    mock.patch.object(triton_backend, "_interpreting", lambda device: False).start()
    processors = SimpleNamespace(multi_processor_count=132, major=capability // 10)
    mock.patch.object(torch.cuda, "get_device_properties", lambda device: processors).start()
    return TritonBackend("meta"), builds


real_run = JITFunction.run
