"""Checks that hold between any two steps, whatever the policies."""

from __future__ import annotations

from swapserve.engine import Engine
from swapserve.params import SamplingParams
from swapserve.request import Request


def check_engine(engine: Engine) -> None:
    """Raise `AssertionError` unless every running request's table is long enough, in range and disjoint from others'.

    Two requests may share a block only where both have computed all of it, with the same tokens at the same
    positions: a slot that anyone may still write belongs to one request alone.
    """
    engine.kv.check()
    size = engine.kv.block_size
    num_blocks = engine.kv.num_slots // size
    owners: dict[int, tuple[Request, int]] = {}
    for request in engine.running.values():
        table = engine.kv.table(request)
        assert len(table) * size >= request.computed, f"{request.id}: {request.computed} computed, {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request.id}: a block stands twice in its table {list(table)}"
        for index, block in enumerate(table):
            assert 0 <= block < num_blocks, f"{request.id}: block {block} of {num_blocks}"
            first, end = index * size, (index + 1) * size
            if block not in owners:
                owners[block] = (request, index)
                continue
            other, other_index = owners[block]
            assert index == other_index and end <= request.computed and end <= other.computed, (
                f"{request.id} and {other.id} both hold block {block}, and one of them may still write to it"
            )
            assert request.tokens[first:end] == other.tokens[first:end], (
                f"{request.id} and {other.id} share block {block} with different tokens"
            )
    for request in engine.waiting.values():
        assert request.computed == 0 and request.draft is None, f"{request.id} waits but has state of a running request"
    assert 0.0 <= engine.kv.usage() <= 1.0


def check_idle(engine: Engine) -> None:
    """Raise `AssertionError` unless an engine without work holds no slot, and all slots could be had again."""
    assert not engine.has_work
    engine.kv.check()
    assert engine.kv.usage() == 0.0, f"{engine.kv.usage():.3f} of the slots are held with nothing to run"
    assert engine.kv.fits(_whole_pool(engine), 0, engine.kv.longest()), "not all slots came back"


def check_all_slots(engine: Engine) -> None:
    """Take every slot of an idle engine once; what is kept for sharing is gone afterwards."""
    check_idle(engine)
    whole = _whole_pool(engine)
    assert engine.kv.reserve(whole, 0, len(whole.prompt)), "fits said yes and reserve said no"
    engine.kv.free(whole)
    check_idle(engine)


def _whole_pool(engine: Engine) -> Request:
    """A request that needs all the slots there are."""
    longest = engine.kv.longest()
    return Request("whole-pool", (0,) * longest, SamplingParams(max_tokens=1), max_len=longest + 1)


def snapshot(request: Request) -> tuple[object, ...]:
    """Everything about a request that policies may read and must not write."""
    return (
        request.id,
        request.prompt,
        tuple(request.tokens),
        request.draft,
        request.computed,
        request.max_len,
        request.finish_reason,
        request.preemptions,
        request.priority,
        request.seed,
    )
