"""The contract of every KV manager, for `prefix`, and what is its own."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from swapserve_kv_prefix import Prefix

from swapserve import FinishReason, Plugins, Request, Scheduler
from swapserve.engine import Stalled
from swapserve.testing import GhostExecutor, KVManagerContract, check_engine, check_idle, ghost_info, greedy
from swapserve.testing.ledger import make_request
from swapserve.testing.wrappers import RefusingKV


class TestPrefix(KVManagerContract):
    policy = Prefix


class TestPrefixWithShortDigests(KVManagerContract):
    """H36: the suite again with digests of eight bits, where many blocks collide."""

    policy = Prefix
    num_workloads = 10

    def manager(self, num_blocks: int) -> Prefix:
        kv = manager(num_blocks)
        kv.digest_bytes = 1
        return kv


def stored(kv: Prefix, name: str, tokens: list[int], salt: str | None = None) -> Request:
    """A request that has computed all of `tokens` and still holds them."""
    request = make_request(name, tokens, len(tokens) + 8, salt)
    cached = kv.lookup(request)
    assert kv.reserve(request, cached, len(tokens))
    request.tokens.append(0)
    request.computed = len(tokens)
    kv.commit(request)
    return request


def manager(num_blocks: int, block_size: int = 4) -> Prefix:
    return Prefix(Prefix.Options(block_size=block_size), num_blocks * block_size)


def test_a_prompt_finds_what_another_stored() -> None:
    kv = manager(20)
    first = stored(kv, "first", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    probe = make_request("probe", [1, 2, 3, 4, 5, 6, 7, 8, 5], 20)
    assert kv.lookup(probe) == 8
    assert kv.reserve(probe, 8, 9) and list(kv.table(probe))[:2] == list(kv.table(first))[:2]
    assert kv.lookup(make_request("other", [1, 2, 3, 4, 9, 6, 7, 8, 5], 20)) == 4
    assert kv.lookup(make_request("later", [0, 1, 2, 3, 4, 5, 6, 7, 8], 20)) == 0
    growing = make_request("growing", [1, 2, 3, 4, 5], 20)
    assert kv.lookup(growing) == 4
    growing.tokens += [6, 7, 8, 9]
    assert kv.lookup(growing) == 8


def test_h07_what_is_found_is_not_counted_as_work() -> None:
    """H07: a prompt of nine tokens with eight stored: one token is scheduled, at position eight."""
    contract = TestPrefix()
    engine = contract.engine(20)
    engine.submit([1] * 9, greedy(1))
    contract.finish(engine)
    engine.submit([1] * 9, greedy(1))
    engine.step()
    plan = engine.last_plan
    assert plan is not None and [(piece.start, piece.count) for piece in plan.slices.values()] == [(8, 1)]
    assert plan.tokens_left == plan.limits.max_num_batched_tokens - 1


def test_h13_a_prefix_shorter_than_a_block_is_not_shared() -> None:
    """H13: a shared prompt of 13 tokens with blocks of 16: no hit is right."""
    kv = manager(8, block_size=16)
    stored(kv, "first", [7] * 13)
    assert kv.lookup(make_request("second", [7] * 13 + [1] * 20, 60)) == 0


def test_h32_hit_blocks_are_no_spare_room() -> None:
    """H32: six blocks: two cached and unheld, one held, three free; a request that hits the two needs four more."""
    kv = manager(6)
    kv.free(stored(kv, "cached", [1] * 8))
    live = make_request("live", [5] * 4, 8)
    assert kv.reserve(live, 0, 4)
    wanted = make_request("wanted", [1] * 8 + [2] * 15, 40)
    assert kv.lookup(wanted) == 8
    assert not kv.fits(wanted, 8, 23) and not kv.reserve(wanted, 8, 23)
    assert kv.lookup(wanted) == 8 and not kv.table(wanted)
    assert not kv.fits(make_request("stale", [9] * 8, 20), 4, 8), "a hit that is not there"
    kv.check()
    kv.free(live)
    assert kv.fits(wanted, 8, 23) and kv.reserve(wanted, 8, 23)


def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    kv = manager(4)
    kv.free(stored(kv, "old", [1] * 8))
    kv.free(stored(kv, "new", [2] * 8))
    filler = make_request("filler", [3] * 4, 20)
    assert kv.reserve(filler, 0, 4)
    assert kv.lookup(make_request("a", [1] * 9, 20)) == 4 and kv.lookup(make_request("b", [2] * 9, 20)) == 8
    assert kv.reserve(filler, 0, 8)
    assert kv.lookup(make_request("c", [1] * 9, 20)) == 0 and kv.lookup(make_request("d", [2] * 9, 20)) == 8


@pytest.mark.parametrize("num_blocks", [9, 25, 60, 1000])
def test_a_trace_of_conversations_reuses_what_an_lru_cache_can(num_blocks: int) -> None:
    """Turns of 40 conversations with one system prompt, replayed: as many hits as in a plain model of the cache."""
    rng = random.Random(num_blocks)
    histories = [[0] * 6 + [n + 1] * 2 for n in range(40)]
    kv, cache = manager(num_blocks), OrderedDict[tuple[int, ...], None]()
    total = 0
    for turn in range(400):
        tokens = rng.choice(histories)
        tokens += [rng.randrange(50) for _ in range(rng.randint(1, 6))]
        del tokens[30:]
        blocks = [tuple(tokens[:end]) for end in range(4, len(tokens), 4)]
        expected = next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        request = make_request(str(turn), tokens, 40)
        assert kv.lookup(request) == 4 * expected
        for block in blocks:
            cache.pop(block, None)
        while len(cache) > num_blocks - -(-len(tokens) // 4):
            cache.popitem(last=False)
        if len(tokens) % 4 == 0:
            # The last full block is stored too; a request of the same length may not use it.
            blocks.append(tuple(tokens))
            cache.pop(blocks[-1], None)
        cache.update(dict.fromkeys(reversed(blocks)))
        kv.free(stored(kv, str(turn), tokens))
        kv.check()
        total += expected
    assert total > 100


def test_h35_no_two_salts_share_a_block() -> None:
    """H35: the salt is tagged and length-prefixed in the digest, so none reads like another or like tokens."""
    salts = [None, "", "x", "\0", "\1", "x" * 8, "x" * 16, "block"]
    kv = manager(80)
    probes = [make_request(f"probe-{number}", [1] * 17, 40, salt) for number, salt in enumerate(salts)]
    for probe in probes:
        assert kv.lookup(probe) == 0, f"{probe.cache_salt!r} found what another salt stored"
        stored(kv, f"stored-{probe.id}", [1] * 17, probe.cache_salt)
    assert all(kv.lookup(probe) == 16 for probe in probes), "one salt's block took the place of another's"


def test_h36_a_digest_collision_is_a_miss() -> None:
    """H36: with digests of eight bits and 300 prompts, every hit is on the very same tokens."""
    kv = manager(2000)
    kv.digest_bytes = 1
    rng = random.Random(36)
    contents: dict[int, list[int]] = {}
    for number in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randint(4, 24))]
        request = make_request(str(number), tokens, 60)
        found = kv.lookup(request)
        assert kv.reserve(request, found, len(tokens))
        for index, block in enumerate(kv.table(request)):
            if index * 4 < found:
                assert contents[block] == tokens[: index * 4 + 4], "a block of another prompt"
            else:
                contents[block] = tokens[: index * 4 + 4]
        request.tokens.append(0)
        request.computed = len(tokens)
        kv.commit(request)
        if rng.random() < 0.5:
            kv.free(request)
        kv.check()


def test_the_next_block_is_awaited_while_another_computes_it() -> None:
    kv = manager(20)
    leader = make_request("leader", [1] * 12, 20)
    assert kv.reserve(leader, 0, 12)
    follower = make_request("follower", [1] * 12, 20)
    assert kv.awaited(follower) == "leader" and kv.awaited(make_request("short", [1] * 4, 20)) is None
    assert kv.awaited(make_request("other", [2] * 12, 20)) is None and kv.awaited(leader) is None
    leader.computed = 8
    kv.commit(leader)
    assert kv.lookup(follower) == 8 and kv.awaited(follower) is None
    kv.free(leader)
    other = make_request("leader-2", [3] * 12, 20)
    assert kv.reserve(other, 0, 12)
    kv.free(other)
    assert kv.awaited(make_request("late", [3] * 12, 20)) is None


def test_no_one_is_awaited_for_a_block_that_it_has_stored() -> None:
    """Two compute one block; the one that promised it commits last, and keeps it when the other's copy is gone."""
    kv = manager(6)
    promised, other = make_request("promised", [1] * 4, 20), make_request("other", [1] * 4, 20)
    assert kv.reserve(promised, 0, 4) and kv.reserve(other, 0, 4)
    for request in (other, promised):
        request.computed = 4
        request.tokens.append(0)
        kv.commit(request)
    kv.free(other)
    filler = make_request("filler", [3] * 20, 24)
    assert kv.reserve(filler, 0, 20)
    probe = make_request("probe", [1] * 5, 20)
    assert kv.lookup(probe) == 0 and kv.awaited(probe) is None


def test_requests_that_arrive_together_share_their_prefix() -> None:
    """All but the first wait one step and then hit, under a scheduler that lets them."""
    info = ghost_info(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=60)
    for name in ("continuous", "chunked"):
        scheduler = Plugins().policy("scheduler", name)
        assert issubclass(scheduler, Scheduler)
        engine = TestPrefix().engine(80, max_num_seqs=8, max_num_batched_tokens=info.max_num_batched_tokens)
        engine.scheduler = scheduler(scheduler.Options())
        requests = [engine.submit([9] * 24 + [n], greedy(3)) for n in range(8)]
        while engine.has_work:
            engine.step()
        assert [request.cached_tokens for request in requests] == [0] + [24] * 7


def test_no_block_outlives_the_one_before_it() -> None:
    """Two that compute one prefix at once, the second's tail outlives the first's head: it can be stored anew."""
    kv = manager(8)
    first, second = make_request("first", [1] * 8, 12), make_request("second", [1] * 4 + [2] * 5, 12)
    assert kv.reserve(first, 0, 8) and kv.reserve(second, 0, 9)
    for request in (first, second):
        request.computed = len(request.tokens)
        request.tokens.append(0)
        kv.commit(request)
    kv.free(first)
    filler = make_request("filler", [3] * 20, 24)
    assert kv.reserve(filler, 0, 20) and kv.lookup(make_request("gone", [1] * 9, 12)) == 0
    kv.free(filler)
    kv.free(second)
    for name, found in (("third", 0), ("fourth", 8)):
        probe = make_request(f"probe-{name}", [1] * 4 + [2] * 5, 12)
        assert kv.lookup(probe) == found
        kv.free(stored(kv, name, [1] * 4 + [2] * 5))
        kv.check()


def test_h50_what_others_share_is_not_found_either_when_it_is_discarded() -> None:
    """H50: a sharer keeps what it holds, and nothing that it stores after that is found."""
    kv = manager(20)
    bad = stored(kv, "bad", [1] * 9)
    sharer = stored(kv, "sharer", [1] * 8 + [2] * 5)
    held = list(kv.table(sharer))
    kv.discard(bad)
    sharer.tokens += [3] * 4
    assert kv.reserve(sharer, 0, len(sharer.tokens))
    sharer.computed = len(sharer.tokens) - 1
    kv.commit(sharer)
    assert list(kv.table(sharer))[: len(held)] == held
    assert kv.lookup(make_request("next", list(sharer.tokens), 40)) == 0
    kv.free(sharer)
    kv.check()
    assert kv.lookup(make_request("later", list(sharer.tokens), 40)) == 0 and kv.usage() == 0.0
    assert not kv._unheld, "blocks are kept that no one can find"


def test_h33_the_books_agree_after_every_step() -> None:
    """H33: 300 requests with drafts of five, a third aborted at random, refusals injected: no block is ever lost."""
    rng = random.Random(33)
    engine = TestPrefix().engine(1, max_num_seqs=6, max_model_len=120)
    kv = Prefix(Prefix.Options(block_size=16), 14 * 16)
    engine.kv = refusing = RefusingKV(kv, seed=33, share=0.1)
    engine.executor = GhostExecutor(14, 16)
    chunked, ngram = Plugins().policy("scheduler", "chunked"), Plugins().policy("speculator", "ngram")
    engine.scheduler = chunked(chunked.Options())
    engine.speculator = ngram(ngram.Options(num_speculative_tokens=5), engine.model)
    system = [rng.randrange(6) for _ in range(40)]
    submitted: list[Request] = []
    while len(submitted) < 300 or engine.has_work:
        while len(submitted) < 300 and len(engine.waiting) < 6:
            prompt = system[: rng.randint(1, 40)] + [rng.randrange(6) for _ in range(rng.randint(0, 20))]
            submitted.append(engine.submit(prompt, greedy(rng.randint(1, 40))))
        if rng.random() < 0.1 and engine.has_work:
            engine.abort(rng.choice([*engine.running, *engine.waiting]))
        try:
            engine.step()
        except Stalled:
            assert not engine.running, "only where everyone was refused at random"
        check_engine(engine)
        held = {block for request in engine.running.values() for block in kv.table(request)}
        assert len(kv._free) + len(kv._unheld) + len(held) == 14 and min(kv._holders) >= 0
    refusing.relent()
    check_idle(engine)
    aborted = sum(request.finish_reason is FinishReason.ABORT for request in submitted)
    assert engine.num_preemptions > 20 and 60 < aborted < 150


class Counted(list[int]):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_costs_what_is_new_and_a_second_look_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, hashed = manager(600), []
    sha256: Callable[[bytes], Any] = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda content: (hashed.append(content), sha256(content))[1])
    request = stored(kv, "long", list(range(2000)))
    assert len(hashed) == 500
    request.tokens = tokens = Counted(request.tokens)
    for _ in range(40):
        assert kv.reserve(request, 0, len(tokens))
        request.computed = len(tokens)
        tokens.append(7)
        kv.commit(request)
    assert tokens.num_read <= 2 * 40 + 8 and len(hashed) == 510
    probe = make_request("probe", list(range(2000)), 2100)
    probe.tokens = read = Counted(probe.tokens)
    assert kv.lookup(probe) == 1996
    once = read.num_read
    for _ in range(5):
        assert kv.lookup(probe) == 1996 and kv.fits(probe, 1996, 2000) and kv.awaited(probe) is None
    assert read.num_read == once
