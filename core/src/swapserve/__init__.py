"""A minimal LLM serving engine whose scheduler, KV manager and speculator are plugins chosen by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swapserve.batch import Batch, Executor, Slice, Verdict, Work
from swapserve.clock import Clock, ManualClock, MonotonicClock
from swapserve.engine import Engine, Stalled
from swapserve.hookspecs import hookimpl
from swapserve.params import SamplingParams
from swapserve.plan import Grant, Limits, PolicyError, Refusal, StepPlan
from swapserve.plugins import PluginError, Plugins
from swapserve.policies import KVManager, ModelInfo, OpenModel, PolicyOptions, Scheduler, Speculator
from swapserve.report import StepReport
from swapserve.request import Draft, FinishReason, Output, Request, RequestRefused, TokenLogprobs
from swapserve.spec import PolicySpec

if TYPE_CHECKING:
    from swapserve.llm import LLM, Completion

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Batch",
    "Clock",
    "Completion",
    "Draft",
    "Engine",
    "Executor",
    "FinishReason",
    "Grant",
    "KVManager",
    "Limits",
    "ManualClock",
    "ModelInfo",
    "MonotonicClock",
    "OpenModel",
    "Output",
    "PluginError",
    "Plugins",
    "PolicyError",
    "PolicyOptions",
    "PolicySpec",
    "Refusal",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "Scheduler",
    "Slice",
    "Speculator",
    "Stalled",
    "StepPlan",
    "StepReport",
    "TokenLogprobs",
    "Verdict",
    "Work",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """`LLM` needs torch and transformers; they are imported only by those who use it."""
    if name in ("LLM", "Completion"):
        return getattr(import_module("swapserve.llm"), name)
    raise AttributeError(f"module 'swapserve' has no attribute {name!r}")
