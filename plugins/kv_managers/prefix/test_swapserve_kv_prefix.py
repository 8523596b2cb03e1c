"""The contract of every KV manager, for `prefix`, and what is its own."""

from __future__ import annotations

import random

from swapserve_kv_prefix import Prefix

from swapserve import Plugins, Request, Scheduler
from swapserve.testing import KVManagerContract, ghost_info, greedy
from swapserve.testing.ledger import make_request


class TestPrefix(KVManagerContract):
    policy = Prefix


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


def test_h35_no_two_salts_share_a_block() -> None:
    """H35: the salt is tagged and length-prefixed in the digest, so none reads like another or like tokens."""
    salts = [None, "x", "\0", "\1", "x" * 8, "x" * 16, "block"]
    kv = manager(80)
    for number, salt in enumerate(salts):
        probe = make_request(f"probe-{number}", [1] * 17, 40, salt)
        assert kv.lookup(probe) == 0, f"{salt!r} found what another salt stored"
        stored(kv, f"stored-{number}", [1] * 17, salt)
        assert kv.lookup(probe) == 16


def test_h36_a_digest_collision_is_a_miss() -> None:
    """H36: with digests of eight bits and 300 prompts, every hit is on the very same tokens."""
    kv = manager(2000)
    kv.digest_bytes = 1
    rng = random.Random(36)
    contents: dict[int, list[int]] = {}
    for number in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randint(4, 24))]
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
