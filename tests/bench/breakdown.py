"""Where the time of a run on our engine goes: each part is timed by wrapping the function that does it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swapserve.engine import Engine
from swapserve.executor import TorchExecutor
from swapserve.linear import PackedLinear
from swapserve.model import LoadedModel

PARTS = ("head", "body products", "attention", "KV writes", "norms, rotary, activations, Python", "sampling", "loop")


@contextmanager
def timed_parts(kernels: Any) -> Iterator[Callable[[], dict[str, float]]]:
    """Time everything inside the block; the function it gives returns the milliseconds a step of each part."""
    spent: dict[str, float] = defaultdict(float)
    steps = 0
    undo: list[Callable[[], None]] = []

    def watch(owner: Any, name: str, label: str) -> None:
        plain = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += label == "step"
            begin = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter() - begin

        had_own = name in vars(owner)
        setattr(owner, name, timed)
        undo.append(lambda: setattr(owner, name, plain) if had_own else delattr(owner, name))

    watch(Engine, "step", "step")
    watch(TorchExecutor, "execute", "execute")
    watch(LoadedModel, "hidden", "hidden")
    watch(LoadedModel, "logits", "head")
    watch(PackedLinear, "forward", "products")
    watch(kernels, "attention_varlen", "attention")
    watch(kernels, "write_kv", "writes")

    def report() -> dict[str, float]:
        body = spent["products"] - spent["head"]
        seconds = (
            spent["head"],
            body,
            spent["attention"],
            spent["writes"],
            spent["hidden"] - body - spent["attention"] - spent["writes"],
            spent["execute"] - spent["hidden"] - spent["head"],
            spent["step"] - spent["execute"],
        )
        return {part: 1000 * value / max(1, steps) for part, value in zip(PARTS, seconds, strict=True)}

    try:
        yield report
    finally:
        for restore in reversed(undo):
            restore()
