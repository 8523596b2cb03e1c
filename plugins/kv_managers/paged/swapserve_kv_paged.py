"""Paged allocation (vLLM's PagedAttention, Kwon et al. 2023): fixed-size blocks from one pool, taken on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from pydantic import Field

from swapserve import KVManager, PolicyOptions, Request, hookimpl


@final
class Paged(KVManager):
    """Gives a request blocks as it grows and takes all of them back when it ends: waste is at most one block each."""

    name = "paged"

    class Options(PolicyOptions):
        block_size: int = Field(16, ge=1, description="slots in a block")

    def __init__(self, options: Options, num_slots: int) -> None:
        super().__init__(options, num_slots // options.block_size * options.block_size)
        self.block_size = options.block_size
        self._num_blocks = num_slots // options.block_size
        self._free = list(range(self._num_blocks - 1, -1, -1))
        self._tables: dict[str, list[int]] = {}

    def fits(self, request: Request, cached: int, total: int) -> bool:
        return self._missing(request, total) <= len(self._free)

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        missing = self._missing(request, total)
        if missing > len(self._free):
            return False
        table = self._tables.setdefault(request.id, [])
        for _ in range(missing):
            table.append(self._free.pop())
        return True

    def table(self, request: Request) -> Sequence[int]:
        return self._tables.get(request.id, ())

    def commit(self, request: Request) -> None:
        """Blocks that only a rejected draft needed go back."""
        table = self._tables.get(request.id)
        if table is not None:
            needed = -(-len(request.tokens) // self.block_size)
            while len(table) > needed:
                self._free.append(table.pop())

    def free(self, request: Request) -> None:
        self._free.extend(reversed(self._tables.pop(request.id, ())))

    def usage(self) -> float:
        return (self._num_blocks - len(self._free)) / self._num_blocks

    def check(self) -> None:
        blocks = [*self._free, *(block for table in self._tables.values() for block in table)]
        assert sorted(blocks) == list(range(self._num_blocks)), "a block is lost, or is in two places"

    def _missing(self, request: Request, total: int) -> int:
        """Blocks that a request lacks for `total` slots; none or fewer when it holds enough."""
        return -(-total // self.block_size) - len(self._tables.get(request.id, ()))


@hookimpl
def swapserve_register_kv_manager() -> type[KVManager]:
    return Paged
