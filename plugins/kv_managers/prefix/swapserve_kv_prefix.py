"""Paged allocation with a shared prefix cache (vLLM's automatic prefix caching): full blocks found by content.

A full block of verified tokens is published under a digest of everything before it and of its own tokens. Another
request whose prompt begins with the same tokens, under the same salt, holds that block instead of computing it.
Blocks that no one holds stay findable until their space is needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from pydantic import Field

from swapserve import KVManager, PolicyOptions, Request, hookimpl


@dataclass(eq=False, slots=True)
class _Entry:
    """A full block as it can be found: what it holds, and the entry of the block before it."""

    digest: bytes
    tokens: tuple[int, ...]
    parent: _Entry | None
    salt: str | None
    block: int
    """Where its keys and values are."""
    children: set[int] = field(default_factory=set)
    """The blocks that can be found only through this one."""

    def holds(self, tokens: tuple[int, ...], parent: _Entry | None, salt: str | None) -> bool:
        """Whether this is that block: a digest that happens to be the same is not enough."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


@dataclass(eq=False, slots=True)
class _Known:
    """What was worked out about one request's tokens. They only grow, so it holds until the request is freed."""

    digests: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as anyone has asked."""
    hits: list[_Entry] = field(default_factory=list)
    """What a look-up found when the index had changed `version` times and there were `length` tokens."""
    version: int = -1
    length: int = 0


@dataclass(eq=False, slots=True)
class _Held:
    """What one request holds."""

    table: list[int] = field(default_factory=list)
    chain: list[_Entry] = field(default_factory=list)
    """The entries of its leading full blocks that are verified; each is the parent of the next."""
    promised: list[bytes] = field(default_factory=list)
    """Digests of the blocks it is going to publish while it computes its prompt."""


@final
class Prefix(KVManager):
    """Shares full blocks of equal tokens between requests and keeps them when they end."""

    name = "prefix"

    class Options(PolicyOptions):
        block_size: int = Field(16, ge=1, description="slots in a block; only full blocks are shared")

    def __init__(self, options: Options, num_slots: int) -> None:
        super().__init__(options, num_slots // options.block_size * options.block_size)
        self.block_size = options.block_size
        self.digest_bytes = 32
        """How much of a sha256 digest is kept; less makes collisions, which cost hits and never change an output."""
        self._num_blocks = num_slots // options.block_size
        self._free = list(range(self._num_blocks - 1, -1, -1))
        self._unheld: OrderedDict[int, None] = OrderedDict()
        """Published blocks that no one holds, the least recently used first."""
        self._holders = [0] * self._num_blocks
        self._index: dict[bytes, _Entry] = {}
        self._version = 0
        self._published: dict[int, _Entry] = {}
        self._held: dict[str, _Held] = {}
        self._promises: dict[bytes, str] = {}
        self._known: dict[str, _Known] = {}

    def lookup(self, request: Request) -> int:
        return len(self._hits(request)) * self.block_size

    def awaited(self, request: Request) -> str | None:
        found = len(self._hits(request))
        if (found + 1) * self.block_size > len(request.tokens) - 1:
            return None
        owner = self._promises.get(self._digest(request, found))
        return owner if owner != request.id else None

    def fits(self, request: Request, cached: int, total: int) -> bool:
        held = self._held.get(request.id)
        needed = -(-total // self.block_size)
        if held is not None:
            return needed - len(held.table) <= len(self._free) + len(self._unheld)
        hits = self._hits(request)[: cached // self.block_size]
        # A block that is about to be shared is no room for anything else.
        spare = len(self._free) + len(self._unheld) - sum(entry.block in self._unheld for entry in hits)
        return len(hits) == cached // self.block_size and needed - len(hits) <= spare

    def reserve(self, request: Request, cached: int, total: int) -> bool:
        if not self.fits(request, cached, total):
            return False
        held = self._held.get(request.id)
        if held is None:
            held = self._held[request.id] = _Held(chain=self._hits(request)[: cached // self.block_size])
            # What is shared is held before anything is evicted to make room for the rest.
            for entry in held.chain:
                self._hold(entry.block)
                held.table.append(entry.block)
            self._promise(request, held)
        while len(held.table) * self.block_size < total:
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            held.table.append(block)
        return True

    def table(self, request: Request) -> Sequence[int]:
        held = self._held.get(request.id)
        return held.table if held is not None else ()

    def commit(self, request: Request) -> None:
        held = self._held.get(request.id)
        if held is None:
            return
        for index in range(len(held.chain), request.computed // self.block_size):
            self._publish(request, held, index)
        while len(held.table) * self.block_size >= len(request.tokens) + self.block_size:
            self._release(held.table.pop())

    def free(self, request: Request) -> None:
        self._known.pop(request.id, None)
        held = self._held.pop(request.id, None)
        if held is not None:
            self._withdraw(request, held)
            # The end of a chain goes first: a block is of no use without those before it.
            for block in reversed(held.table):
                self._release(block)

    def discard(self, request: Request) -> None:
        for block in self.table(request):
            self._unpublish(block)
        self.free(request)

    def usage(self) -> float:
        return (self._num_blocks - len(self._free) - len(self._unheld)) / self._num_blocks

    def reset(self) -> bool:
        for block in list(self._unheld):
            self._unpublish(block)
        return not self._published

    def check(self) -> None:
        counts = [0] * self._num_blocks
        for held in self._held.values():
            for block in held.table:
                counts[block] += 1
        assert counts == self._holders, "a block is held by more or fewer than its count says"
        loose = [*self._free, *self._unheld]
        assert not any(counts[block] for block in loose), "a block is held and free at once"
        assert len(set(loose)) == len(loose) == counts.count(0), "a block is lost, or free twice"
        assert all(block in self._published for block in self._unheld), "a block without content is kept"
        found = {entry.block: entry for entry in self._index.values()}
        assert found == self._published, "what can be found is not what is published"
        assert all(self._reachable(entry.parent) for entry in found.values()), "no look-up can come to a block"

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.tokens[index * self.block_size : (index + 1) * self.block_size])

    def _digest(self, request: Request, index: int) -> bytes:
        """The digest of a request's full block: tagged and length-prefixed, so that no two layouts read the same."""
        digests = self._known.setdefault(request.id, _Known()).digests
        while len(digests) <= index:
            if not digests:
                salt = b"\0" if request.cache_salt is None else b"\1" + request.cache_salt.encode()
                parent = b"swapserve prefix 1" + struct.pack("<q", len(salt)) + salt
            else:
                parent = b"block" + digests[-1]
            tokens = self._tokens(request, len(digests))
            content = parent + struct.pack(f"<q{len(tokens)}q", len(tokens), *tokens)
            digests.append(hashlib.sha256(content).digest()[: self.digest_bytes])
        return digests[index]

    def _hits(self, request: Request) -> list[_Entry]:
        """The entries of the leading full blocks of `tokens[:-1]` that can be found now.

        A step asks several times for each request it might admit: the same answer is good until the index changes.
        """
        known = self._known.setdefault(request.id, _Known())
        if known.version == self._version and known.length == len(request.tokens):
            return known.hits
        hits: list[_Entry] = []
        for index in range((len(request.tokens) - 1) // self.block_size):
            entry = self._index.get(self._digest(request, index))
            parent = hits[-1] if hits else None
            if entry is None or not entry.holds(self._tokens(request, index), parent, request.cache_salt):
                break
            hits.append(entry)
        known.hits, known.version, known.length = hits, self._version, len(request.tokens)
        return hits

    def _promise(self, request: Request, held: _Held) -> None:
        for index in range(len(held.chain), len(request.tokens) // self.block_size):
            digest = self._digest(request, index)
            if self._promises.setdefault(digest, request.id) == request.id:
                held.promised.append(digest)

    def _withdraw(self, request: Request, held: _Held) -> None:
        for digest in held.promised:
            if self._promises.get(digest) == request.id:
                del self._promises[digest]
        held.promised.clear()

    def _publish(self, request: Request, held: _Held, index: int) -> None:
        """Make a verified full block findable, unless its like is already, or the one before it is not.

        Of two blocks whose digests collide the first stays: that costs hits, once in 2**128 blocks.
        """
        digest, tokens = self._digest(request, index), self._tokens(request, index)
        parent = held.chain[-1] if held.chain else None
        entry = self._index.get(digest)
        if entry is None or not entry.holds(tokens, parent, request.cache_salt):
            taken = entry is not None
            entry = _Entry(digest, tokens, parent, request.cache_salt, held.table[index])
            if not taken and self._reachable(parent):
                self._index[digest] = self._published[entry.block] = entry
                self._version += 1
                if parent is not None:
                    parent.children.add(entry.block)
        held.chain.append(entry)
        if self._promises.get(digest) == request.id:
            del self._promises[digest]

    def _reachable(self, parent: _Entry | None) -> bool:
        """Whether a look-up that begins at the first block comes to what follows `parent`."""
        return parent is None or self._published.get(parent.block) is parent

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._unheld[block]
        self._holders[block] += 1

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._published:
                self._unheld[block] = None
            else:
                self._free.append(block)

    def _unpublish(self, block: int) -> None:
        """Let no one find a block's content any more, nor what follows it; those that no one holds become free.

        A block is evicted after those that follow it, unless they follow the copy that another request made of it.
        """
        pending = [block]
        while pending:
            block = pending.pop()
            entry = self._published.pop(block, None)
            if entry is None:
                continue
            del self._index[entry.digest]
            self._version += 1
            pending += entry.children
            if entry.parent is not None:
                entry.parent.children.discard(block)
            if block in self._unheld:
                del self._unheld[block]
                self._free.append(block)

    def _evict(self) -> int:
        """Take the least recently used block that no one holds."""
        self._unpublish(next(iter(self._unheld)))
        return self._free.pop()


@hookimpl
def swapserve_register_kv_manager() -> type[KVManager]:
    return Prefix
