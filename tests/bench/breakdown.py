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
def timed_parts(model: LoadedModel) -> Iterator[Callable[[], dict[str, float]]]:
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
    watch(PackedLinear, "activated", "products")
    watch(PackedLinear, "multiplied", "products")
    watch(model.kernels, "attention_varlen", "attention")
    watch(model.kernels, "write_kv", "writes")
    head_is_counted = model.module.get_output_embeddings().is_whole

    def report() -> dict[str, float]:
        body = spent["products"] - head_is_counted * spent["head"]
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
