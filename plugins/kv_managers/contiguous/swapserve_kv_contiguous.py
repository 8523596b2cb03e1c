"""Contiguous allocation: one run of slots for a request's greatest length. The baseline whose waste paging removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from pydantic import Field

from swapserve import KVManager, PolicyOptions, Request, hookimpl


@final
class Contiguous(KVManager):
    """Holds the slots a request could ever need from admission to finish, side by side, first fit.

    Its table is a run of consecutive blocks. What a request does not use of its run no one else can use, and
    free runs that are too short wait for their neighbours.
    """

    name = "contiguous"

    class Options(PolicyOptions):
        block_size: int = Field(16, ge=1, description="slots in a block; runs are rounded up to whole blocks")

    def __init__(self, options: Options, num_slots: int) -> None:
        super().__init__(options, num_slots // options.block_size * options.block_size)
        self.block_size = options.block_size
        self._num_blocks = num_slots // options.block_size
        self._runs: dict[str, range] = {}

    def fits(self, request: Request, cached: int, total: int) -> bool:
        held = self._runs.get(request.id)
        if held is not None:
            return total <= len(held) * self.block_size
        return self._first_fit(self._needed(request, total)) is not None

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        if request.id in self._runs:
            return self.fits(request, cached, total)
        needed = self._needed(request, total)
        start = self._first_fit(needed)
        if start is None:
            return False
        self._runs[request.id] = range(start, start + needed)
        return True

    def table(self, request: Request) -> Sequence[int]:
        return self._runs.get(request.id, range(0))

    def free(self, request: Request) -> None:
        self._runs.pop(request.id, None)

    def usage(self) -> float:
        return sum(map(len, self._runs.values())) / self._num_blocks

    def check(self) -> None:
        end = 0
        for run in self._in_order():
            assert run.start >= end and run.stop <= self._num_blocks, f"runs overlap at block {run.start}"
            end = run.stop

    def _needed(self, request: Request, total: int) -> int:
        """Blocks for the whole life of a request: its last token is never stored."""
        return -(-max(total, request.max_len - 1) // self.block_size)

    def _in_order(self) -> list[range]:
        return sorted(self._runs.values(), key=lambda run: run.start)

    def _first_fit(self, needed: int) -> int | None:
        """The first block of the first gap of `needed` blocks, or None."""
        end = 0
        for run in self._in_order():
            if run.start - end >= needed:
                return end
            end = run.stop
        return end if self._num_blocks - end >= needed else None


@hookimpl
def swapserve_register_kv_manager() -> type[KVManager]:
    return Contiguous
