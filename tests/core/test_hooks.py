"""Every hook is called when its docstring says, and a plugin that misbehaves in one harms no one."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

import swapserve
from swapserve import Engine, Output, Plugins, Scheduler, StepPlan, StepReport, hookimpl, hookspecs
from swapserve.no_speculation import NoSpeculation
from swapserve.testing import GhostExecutor, ghost_info, greedy
from swapserve.testing.simple import GuessingSpeculator, SimpleKV, SimpleScheduler


def engine_with(*watchers: object) -> Engine:
    plugins = Plugins(found=())
    for number, watcher in enumerate(watchers):
        plugins.register(watcher, f"watcher-{number}")
    info = ghost_info()
    return Engine(
        executor=GhostExecutor(20, 4),
        scheduler=SimpleScheduler(SimpleScheduler.Options()),
        kv=SimpleKV(SimpleKV.Options(block_size=4), 80),
        speculator=NoSpeculation(NoSpeculation.Options(), info),
        model=info,
        plugins=plugins.manager,
    )


def register(**hooks: Any) -> Plugins:
    """Plugins with one that implements the given hooks."""
    plugins = Plugins(found=())
    plugins.register(type("Plugin", (), {name: hookimpl(function) for name, function in hooks.items()})(), "given")
    return plugins


def test_hook_swapserve_register_scheduler() -> None:
    plugins = register(swapserve_register_scheduler=lambda self: SimpleScheduler)
    assert plugins.policy("scheduler", "simple") is SimpleScheduler


def test_hook_swapserve_register_kv_manager() -> None:
    plugins = register(swapserve_register_kv_manager=lambda self: [SimpleKV])
    assert plugins.policy("kv", "simple") is SimpleKV


def test_hook_swapserve_register_speculator() -> None:
    plugins = register(swapserve_register_speculator=lambda self: [GuessingSpeculator])
    assert plugins.policy("speculator", "guessing") is GuessingSpeculator
    assert plugins.policy("speculator", "none") is NoSpeculation


class Watcher:
    """Notes every call of every watching hook."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    @hookimpl
    def swapserve_step_planned(self, plan: StepPlan) -> None:
        self.calls.append(("planned", {name: piece.count for name, piece in plan.slices.items()}))

    @hookimpl
    def swapserve_step_finished(self, report: StepReport) -> None:
        self.calls.append(("finished", report))

    @hookimpl
    def swapserve_request_submitted(self, request: swapserve.Request) -> None:
        self.calls.append(("submitted", request.id))

    @hookimpl
    def swapserve_request_finished(self, request: swapserve.Request) -> None:
        self.calls.append(("ended", (request.id, request.finish_reason)))

    def of(self, kind: str) -> list[Any]:
        return [what for called, what in self.calls if called == kind]


def test_hook_swapserve_step_planned() -> None:
    watcher = Watcher()
    engine = engine_with(watcher)
    engine.submit([1, 2, 3], greedy(3))
    list(engine.run())
    assert watcher.of("planned") == [{"req-0": 3}, {"req-0": 1}, {"req-0": 1}]


def test_hook_swapserve_step_finished() -> None:
    watcher = Watcher()
    engine = engine_with(watcher)
    engine.submit([1, 2, 3], greedy(2))
    outputs: list[Output] = list(engine.run())
    first, second = watcher.of("finished")
    assert (first.index, first.num_tokens, first.num_requests, first.num_running, first.num_waiting) == (0, 3, 1, 1, 0)
    assert first.kv_usage > 0 and second.kv_usage == 0 and second.index == 1
    assert [*first.outputs, *second.outputs] == outputs


def test_hook_swapserve_request_submitted() -> None:
    watcher = Watcher()
    engine = engine_with(watcher)
    engine.submit([1], greedy(), request_id="mine")
    assert watcher.calls == [("submitted", "mine")]


def test_hook_swapserve_request_finished() -> None:
    watcher = Watcher()
    engine = engine_with(watcher)
    names = [engine.submit([1, n], greedy(2)).id for n in range(3)]
    engine.abort(names[1])
    list(engine.run())
    assert sorted(watcher.of("ended")) == [(names[0], "length"), (names[1], "abort"), (names[2], "length")]


def test_every_hook_has_a_test() -> None:
    hooks = [name for name in vars(hookspecs) if name.startswith("swapserve_")]
    tests = globals()
    assert len(hooks) == 7 and [name for name in hooks if f"test_hook_{name}" not in tests] == []
    assert all(inspect.getdoc(getattr(hookspecs, name)) for name in hooks)


def test_a_watcher_that_raises_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        @hookimpl
        def swapserve_step_planned(self, plan: StepPlan) -> None:
            raise RuntimeError("planted")

    broken, healthy = Broken(), Watcher()
    engine = engine_with(broken, healthy)
    request = engine.submit([1], greedy(4))
    with caplog.at_level(logging.ERROR):
        list(engine.run())
    assert request.num_output_tokens == 4 and len(healthy.of("planned")) == 4
    assert len(caplog.records) == 1 and "watcher-0" in caplog.text and "swapserve_step_planned" in caplog.text
    assert broken.of("finished") == []


def test_a_misspelt_hook_is_refused_by_name() -> None:
    class Misspelt:
        @hookimpl
        def swapserve_step_plannned(self, plan: StepPlan) -> None: ...

    with pytest.raises(Exception, match="swapserve_step_plannned"):
        Plugins(found=()).register(Misspelt(), "misspelt")


def test_a_class_that_is_no_policy_is_refused() -> None:
    with pytest.raises(swapserve.PluginError, match=r"must be a subclass of swapserve\.Scheduler"):
        register(swapserve_register_scheduler=lambda self: dict)

    class Half(Scheduler):
        name = "half"

    with pytest.raises(swapserve.PluginError, match="it does not define schedule"):
        register(swapserve_register_scheduler=lambda self: Half)


def test_two_managers_share_nothing() -> None:
    one, other = register(swapserve_register_scheduler=lambda self: SimpleScheduler), Plugins(found=())
    assert one.names("scheduler") == ["simple"] and other.names("scheduler") == []


def test_the_public_names_are_these() -> None:
    """A name that appears or goes is a change of the public interface: change this list on purpose."""
    assert swapserve.__all__ == [
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
