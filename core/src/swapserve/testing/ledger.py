"""A ledger of what every slot holds: plays random calls to a KV manager and checks each answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swapserve.params import SamplingParams
from swapserve.policies import KVManager
from swapserve.request import Draft, Request


def make_request(name: str, tokens: Sequence[int], max_len: int, cache_salt: str | None = None) -> Request:
    """A request outside any engine."""
    return Request(name, tuple(tokens), SamplingParams(), max_len=max_len, cache_salt=cache_salt)


class Ledger:
    """Plays the part of the engine towards one KV manager, in random order, and remembers what it stored where."""

    def __init__(self, kv: KVManager, rng: random.Random) -> None:
        self.kv, self.rng = kv, rng
        self.live: list[Request] = []
        self.slots: dict[int, tuple[int, int]] = {}
        self.calls: list[str] = []
        self._made = 0
        self._families = [[rng.randrange(4) for _ in range(24)] for _ in range(3)]

    def act(self) -> None:
        """One random event in the life of a request, and every check after it."""
        choices = [self._admit, self._step, self._step, self._step, self._leave]
        self.rng.choice(choices if self.live else [self._admit])()
        self.kv.check()
        self._check_slots()

    def finish(self) -> None:
        """Let everyone go; the pool must be whole again."""
        while self.live:
            self._leave()
        assert self.kv.usage() == 0.0, f"{self.kv.usage()} held by no one"
        total = self.kv.longest()
        whole = make_request("whole", [5] * total, total + 1)
        assert self.kv.fits(whole, 0, total) and self.kv.reserve(whole, 0, total), "not all slots came back"
        self.kv.free(whole)

    def answers(self) -> list[object]:
        """What the manager says to every question, for live requests and for some that might come."""
        probes = [
            make_request(f"probe-{n}", family[:length], 40)
            for n, family in enumerate(self._families)
            for length in (9, 17)
        ]
        said: list[object] = [self.kv.usage(), self.kv.longest()]
        for request in self.live:
            said += [list(self.kv.table(request)), *(self.kv.fits(request, 0, n) for n in self._totals(request))]
        for probe in probes:
            found = self.kv.lookup(probe)
            said += [found, self.kv.awaited(probe), self.kv.fits(probe, found, len(probe.tokens))]
            self.kv.free(probe)
        return said

    def _totals(self, request: Request) -> list[int]:
        return list(range(len(request.tokens), request.max_len))[:6]

    def _admit(self) -> None:
        self._made += 1
        family = self.rng.choice(self._families)
        tokens = family[: self.rng.randint(1, 20)] + [self.rng.randrange(4) for _ in range(self.rng.randint(0, 3))]
        request = make_request(
            f"r{self._made}", tokens, len(tokens) + self.rng.randint(1, 8), self.rng.choice((None, None, "s"))
        )
        found = self.kv.lookup(request)
        self.calls.append(f"admit {request.id} of {len(tokens)}, {found} found")
        assert 0 <= found < len(tokens), f"lookup said {found} of {len(tokens)}"
        fits = self.kv.fits(request, found, len(tokens))
        assert self.kv.reserve(request, found, len(tokens)) is fits, f"fits said {fits} and reserve the opposite"
        if not fits:
            assert not self.kv.table(request)
            return self.kv.free(request)
        request.computed = found
        self.live.append(request)
        for position in range(found):
            self._expect(request, position)

    def _step(self) -> None:
        """Compute some pending positions, or, when none are pending, decode with a draft of which some are rejected."""
        request = self.rng.choice(self.live)
        pending = len(request.tokens) - request.computed
        if pending > 1:
            count = self.rng.randint(1, pending)
            self._store(request, request.tokens, request.computed, request.computed + count)
            request.computed += count
            self.calls.append(f"chunk {request.id} to {request.computed}")
            if request.computed == len(request.tokens):
                self._sample(request, 1)
            return self.kv.commit(request)
        room = request.draft_room
        draft = [self.rng.randrange(4) for _ in range(self.rng.randint(0, min(room, 5)))]
        total = len(request.tokens) + len(draft)
        held = list(self.kv.table(request))
        fits = self.kv.fits(request, 0, total)
        assert self.kv.reserve(request, 0, total) is fits
        self.calls.append(f"decode {request.id} at {len(request.tokens)} with {len(draft)} drafts: {fits}")
        if not fits:
            assert list(self.kv.table(request)) == held, "a refused reserve changed the table"
            return self._leave(request)
        request.draft = Draft(tuple(draft)) if draft else None
        self._store(request, request.tokens + draft, request.computed, total)
        accepted = self.rng.randint(0, len(draft))
        request.tokens.extend(draft[:accepted])
        request.draft = None
        self._sample(request, 1)
        self.kv.commit(request)
        if len(request.tokens) >= request.max_len:
            self._leave(request)

    def _sample(self, request: Request, count: int) -> None:
        request.tokens.extend(self.rng.randrange(4) for _ in range(count))
        request.computed = len(request.tokens) - 1

    def _leave(self, request: Request | None = None) -> None:
        request = request or self.rng.choice(self.live)
        self.live.remove(request)
        self.calls.append(f"free {request.id}")
        self.kv.free(request)
        assert not self.kv.table(request)

    def _slot(self, request: Request, position: int) -> int:
        size, table = self.kv.block_size, self.kv.table(request)
        assert position < len(table) * size, f"{request.id}: position {position} has no slot in {len(table)} blocks"
        return table[position // size] * size + position % size

    def _store(self, request: Request, tokens: Sequence[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.slots[self._slot(request, position)] = (position, tokens[position])

    def _expect(self, request: Request, position: int) -> None:
        slot = self._slot(request, position)
        assert self.slots.get(slot) == (position, request.tokens[position]), (
            f"{request.id}: position {position} is slot {slot}, which holds {self.slots.get(slot)}"
        )

    def _check_slots(self) -> None:
        """What is computed stands in its slots, and no slot that may still be written belongs to two."""
        writable: dict[int, str] = {}
        for request in self.live:
            table = self.kv.table(request)
            assert len(table) * self.kv.block_size >= request.computed, (
                f"{request.id}: blocks with verified tokens are gone"
            )
            for position in range(request.computed):
                self._expect(request, position)
            for block in table[request.computed // self.kv.block_size :]:
                assert block not in writable, f"{request.id} and {writable[block]} may both write to block {block}"
                writable[block] = request.id
        for request in self.live:
            full = request.computed // self.kv.block_size
            for block in self.kv.table(request)[:full]:
                assert block not in writable, (
                    f"{writable[block]} may write to block {block}, which {request.id} has computed"
                )
