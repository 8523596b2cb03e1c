"""What a decode step costs outside the executor, and that a long queue does not make it cost more.

    python tests/bench/engine_overhead.py

256 running requests, one token each a step, with 100 and with 100,000 requests waiting, measured in turn. The
executor is timed and taken off; it answers at once, so that what is left is planning, bookkeeping and output.
"""

from __future__ import annotations

import gc
import statistics
import time

import click

from swapserve import Batch, Engine, Limits, Plugins, PolicySpec, Verdict
from swapserve.no_speculation import NoSpeculation
from swapserve.policies import KVManager, Scheduler
from swapserve.spec import check_options
from swapserve.testing import ghost_info, greedy


class TimedGhost:
    """Says one fixed token for every request that samples, and counts the time it took itself."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def execute(self, batch: Batch) -> list[Verdict]:
        started = time.perf_counter()
        verdicts = [Verdict((1,)) if work.slice.samples else Verdict() for work in batch.works]
        self.seconds += time.perf_counter() - started
        return verdicts

    def forget(self, request: object) -> None: ...


def decoding_engine(scheduler: str, kv: str, running: int, waiting: int) -> tuple[Engine, TimedGhost]:
    """An engine in which `running` requests decode and `waiting` wait for a seat."""
    plugins = Plugins()
    chosen_scheduler, chosen_kv = plugins.policy("scheduler", scheduler), plugins.policy("kv", kv)
    assert issubclass(chosen_scheduler, Scheduler) and issubclass(chosen_kv, KVManager)
    info, executor = ghost_info(), TimedGhost()
    engine = Engine(
        executor=executor,
        scheduler=chosen_scheduler(check_options("scheduler", chosen_scheduler, PolicySpec(scheduler))),
        kv=chosen_kv(check_options("kv", chosen_kv, PolicySpec(kv)), running * 2048),
        speculator=NoSpeculation(NoSpeculation.Options(), info),
        model=info,
        limits=Limits(running, 64 * running, 4096),
    )
    prompt = [1, 2, 3, 4] * 16
    for number in range(running + waiting):
        engine.submit([number % 24, *prompt[1:]], greedy(1800, ignore_eos=True))
    for _ in range(8):
        engine.step()
    assert len(engine.running) == running and len(engine.waiting) == waiting
    return engine, executor


def step_milliseconds(engine: Engine, executor: TimedGhost) -> float:
    """One step, less the time in the executor."""
    executor.seconds = 0.0
    started = time.perf_counter()
    engine.step()
    return (time.perf_counter() - started - executor.seconds) * 1000


@click.command(help=__doc__)
@click.option("--steps", default=400, help="Steps measured for each queue length.")
@click.option("--running", default=256, help="Requests that decode.")
def main(steps: int, running: int) -> None:
    print("| scheduler | kv | ms a step, 100 waiting | ms a step, 100,000 waiting | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for scheduler in ("static", "continuous", "chunked"):
        for kv in ("contiguous", "paged", "prefix"):
            arms = [decoding_engine(scheduler, kv, running, waiting) for waiting in (100, 100_000)]
            gc.freeze()
            times: list[list[float]] = [[], []]
            for step in range(steps):
                for arm in (0, 1) if step % 2 else (1, 0):
                    times[arm].append(step_milliseconds(*arms[arm]))
            short, long = (statistics.median(one) for one in times)
            print(f"| {scheduler} | {kv} | {short:.2f} | {long:.2f} | {long / short:.3f} |", flush=True)
            del arms
            gc.unfreeze()


if __name__ == "__main__":
    main()
