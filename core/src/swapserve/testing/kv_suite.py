"""The contract of a KV manager, as tests to inherit.

class TestMine(KVManagerContract):
    policy = MyKVManager
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from swapserve.engine import Engine
from swapserve.policies import KVManager
from swapserve.request import FinishReason, Request
from swapserve.testing.driver import Driver
from swapserve.testing.ghost import GhostExecutor, ghost_info, greedy
from swapserve.testing.ledger import Ledger, make_request
from swapserve.testing.simple import GuessingSpeculator, SimpleScheduler, combinations
from swapserve.testing.soundness import check_engine, check_idle
from swapserve.testing.workloads import make_workload
from swapserve.testing.wrappers import WatchedKV


class KVManagerContract:
    """What every KV manager must do, whatever it is combined with."""

    policy: ClassVar[type[KVManager]]
    options: ClassVar[dict[str, Any]] = {}
    block_size: ClassVar[int] = 4
    num_workloads: ClassVar[int] = 60

    def manager(self, num_blocks: int) -> KVManager:
        given = dict(self.options)
        if "block_size" in self.policy.Options.model_fields:
            given.setdefault("block_size", self.block_size)
        return self.policy(self.policy.Options(**given), num_blocks * self.block_size)

    def engine(self, num_blocks: int, **limits: int) -> Engine:
        """The manager on the ghost, with drafts that are often wrong."""
        kv = WatchedKV(self.manager(num_blocks))
        info = ghost_info(**{"max_model_len": 64, "max_num_batched_tokens": 64, **limits})  # type: ignore[arg-type]
        return Engine(
            executor=GhostExecutor(kv.num_slots // kv.block_size, kv.block_size),
            scheduler=SimpleScheduler(SimpleScheduler.Options()),
            kv=kv,
            speculator=GuessingSpeculator(GuessingSpeculator.Options(), info),
            model=info,
        )

    def finish(self, engine: Engine, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not engine.has_work:
                return check_idle(engine)
            engine.step()
            check_engine(engine)
        raise AssertionError(f"{self.policy.name}: no end after {max_steps} steps")

    def test_every_partner_gives_the_same_tokens(self) -> None:
        """With every installed scheduler and speculator: the ghost's own answers, every slot checked, no leak."""
        for seed in range(self.num_workloads):
            for combination in combinations("kv", self.policy, self.options, seed):
                workload = make_workload(seed)
                try:
                    Driver(combination.engine(workload, WatchedKV), workload).run()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, {combination}: {error}") from error

    def test_random_calls_keep_every_promise(self) -> None:
        """Admit, grow, draft, reject, preempt, finish in random order, against a ledger of what each slot holds."""
        for seed in range(150):
            rng = random.Random(seed)
            num_blocks = rng.randint(3, 14)
            ledger = Ledger(self.manager(num_blocks), rng)
            try:
                for _ in range(60):
                    ledger.act()
                ledger.finish()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}\ncalls: {ledger.calls[-25:]}") from error

    def test_questions_change_nothing(self) -> None:
        """`lookup`, `awaited`, `fits`, `table` and `usage` may be asked any number of times in any order."""
        for seed in range(40):
            rng = random.Random(seed)
            ledger = Ledger(self.manager(rng.randint(3, 14)), rng)
            for _ in range(30):
                ledger.act()
                before = ledger.answers()
                assert ledger.answers() == before, f"{self.policy.name}, seed {seed}: an answer changed by asking"

    def test_a_refused_reserve_changes_nothing(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            ledger = Ledger(self.manager(rng.randint(3, 10)), rng)
            for _ in range(30):
                ledger.act()
            big = make_request("big", [rng.randrange(4) for _ in range(200)], 400)
            before = ledger.answers()
            cached = ledger.kv.lookup(big)
            assert not ledger.kv.fits(big, cached, 200) and not ledger.kv.reserve(big, cached, 200)
            assert not ledger.kv.table(big), f"{self.policy.name}: a refused request has a table"
            ledger.kv.free(big)
            assert ledger.answers() == before, f"{self.policy.name}, seed {seed}: a refused reserve left a trace"
            ledger.kv.check()

    def test_the_longest_request_fits_and_one_more_does_not(self) -> None:
        kv = self.manager(7)
        most = kv.longest()
        for total, expected in ((most, True), (most + 1, False)):
            request = make_request(f"of-{total}", [1] * total, total + 1)
            assert kv.fits(request, 0, total) is expected
            assert kv.reserve(request, 0, total) is expected
            kv.free(request)
        assert kv.usage() == 0.0

    def test_freeing_twice_and_the_unknown_is_harmless(self) -> None:
        kv = self.manager(8)
        mine, other, unknown = (make_request(name, [n] * 6, 12) for n, name in enumerate(("mine", "other", "unknown")))
        assert kv.reserve(mine, 0, 6) and kv.reserve(other, 0, 6)
        held = list(kv.table(other))
        for _ in range(2):
            kv.free(mine)
            kv.discard(mine)
            kv.free(unknown)
            kv.discard(unknown)
            kv.commit(unknown)
        assert list(kv.table(other)) == held
        kv.check()
        third = make_request("third", [5] * 6, 12)
        assert kv.reserve(third, kv.lookup(third), 6)
        assert not set(kv.table(third)) & set(held), "a block was given out twice"
        kv.free(other)
        kv.free(third)
        assert kv.usage() == 0.0 and kv.fits(make_request("all", [6] * 32, 33), 0, 32)

    def test_nothing_is_shared_across_salts(self) -> None:
        """What one tenant stored is never found under another salt, nor without one."""
        engine = self.engine(40)
        for salt in (None, "a", "b", "a" * 40):
            request = engine.submit(list(range(16)), greedy(4), cache_salt=salt)
            self.finish(engine)
            assert request.cached_tokens == 0, f"{self.policy.name}: salt {salt!r} found another's blocks"

    def test_rejected_drafts_are_never_found(self) -> None:
        """A prompt made of an earlier request's rejected drafts finds none of them stored."""
        for seed in range(30):
            rng = random.Random(seed)
            kv = self.manager(40)
            request = make_request("drafting", [rng.randrange(4) for _ in range(9)], 60)
            assert kv.reserve(request, 0, 9 + 7)
            request.computed = 8
            kv.commit(request)
            # Nine verified tokens, of which the newest has no KV yet, and seven drafts that were rejected.
            follow = make_request("following", [*request.tokens, *[3] * 7], 60)
            assert kv.lookup(follow) <= 8, f"{self.policy.name}: found unverified tokens"
            request.tokens.append(1)
            request.computed = 9
            kv.commit(request)
            assert kv.lookup(follow) <= 9, f"{self.policy.name}: found unverified tokens"
            kv.free(request)
            assert kv.lookup(follow) <= 9

    def test_h08_a_prompt_that_is_stored_whole_still_computes_a_token(self) -> None:
        """H07 and H08: one block's worth of a fully stored prompt is computed at most, and at least one token."""
        engine = self.engine(40)
        for length in (self.block_size * 2, self.block_size * 2 + 1):
            first = engine.submit([7] * length, greedy(3))
            self.finish(engine)
            again = engine.submit([7] * length, greedy(3))
            self.finish(engine)
            assert list(again.output) == list(first.output)
            assert again.cached_tokens is not None and again.cached_tokens < length
            assert again.cached_tokens == 0 or length - again.cached_tokens <= self.block_size

    def test_h09_a_hit_is_not_remembered_between_tries(self) -> None:
        """H09: looked up, refused, evicted, tried again: the second try sees what is there then."""
        kv = self.manager(6)
        size = self.block_size
        seen = make_request("seen", [1] * (2 * size), 2 * size + 2)
        assert kv.reserve(seen, 0, 2 * size)
        seen.computed = 2 * size - 1
        seen.tokens.append(2)
        seen.computed = 2 * size
        kv.commit(seen)
        kv.free(seen)
        again = make_request("again", [1] * (2 * size) + [3], 2 * size + 3)
        kv.lookup(again)
        filler = make_request("filler", [9] * (6 * size), 6 * size + 1)
        assert kv.reserve(filler, kv.lookup(filler), 6 * size)
        assert kv.lookup(again) == 0, f"{self.policy.name}: a hit on blocks that were given away"
        assert not kv.fits(again, 0, 2 * size + 1)
        kv.free(filler)
        assert kv.reserve(again, kv.lookup(again), 2 * size + 1)
        kv.free(again)
        kv.check()

    def test_h10_hits_and_rejected_drafts_together(self) -> None:
        """H10: the same prompt again after drafts were rejected at every place of a block."""
        for length in range(4, 14):
            engine = self.engine(40)
            model = engine.executor.model  # type: ignore[attr-defined]
            for _ in range(3):
                request = engine.submit([2, 5] * 8, greedy(length))
                self.finish(engine)
                assert list(request.output) == model.continuation(request)

    def test_h12_a_failure_half_way_leaves_a_clean_count(self) -> None:
        """H12: the executor fails in a step that began on a hit; the retry starts over and is right."""
        engine = self.engine(40)
        first = engine.submit([3] * 17, greedy(2))
        self.finish(engine)
        execute = engine.executor.execute
        doomed = engine.submit([3] * 17, greedy(2))

        def failing(batch: Any) -> Any:
            execute(batch)
            raise RuntimeError("planted")

        engine.executor.execute = failing  # type: ignore[method-assign]
        try:
            engine.step()
        except RuntimeError as error:
            outputs = engine.recover(error)
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] and doomed.finished
        engine.executor.execute = execute  # type: ignore[method-assign]
        check_idle(engine)
        retry = engine.submit([3] * 17, greedy(2))
        self.finish(engine)
        assert list(retry.output) == list(first.output)

    def test_h15_nothing_leaks_request_after_request(self) -> None:
        """H15: 2,000 requests one after another; the pool is as empty after each as before."""
        engine = self.engine(12)
        rng = random.Random(15)
        for _ in range(2000):
            engine.submit([rng.randrange(3) for _ in range(rng.randint(1, 12))], greedy(rng.randint(1, 3)))
            while engine.has_work:
                engine.step()
            assert engine.kv.usage() == 0.0
        check_idle(engine)

    def test_h50_what_is_discarded_is_never_found(self) -> None:
        """H50: a request whose values were not numbers leaves nothing behind for others to share."""
        kv = self.manager(12)
        tokens = [4] * (self.block_size * 2 + 1)
        request = make_request("bad", tokens, 30)
        assert kv.reserve(request, 0, len(tokens))
        request.tokens.append(1)
        request.computed = len(tokens)
        kv.commit(request)
        kv.discard(request)
        assert kv.lookup(make_request("next", tokens, 30)) == 0
        assert kv.usage() == 0.0
        kv.check()

    def test_reset_forgets_what_no_one_holds(self) -> None:
        engine = self.engine(40)
        engine.submit([6] * 12, greedy(2))
        self.finish(engine)
        assert engine.kv.inner.reset() is True  # type: ignore[attr-defined]
        assert engine.kv.lookup(Request("again", (6,) * 12, greedy(2))) == 0

    def test_block_size_and_slots_agree(self) -> None:
        kv = self.manager(9)
        assert kv.block_size > 0 and kv.num_slots % kv.block_size == 0 and 0 < kv.longest() <= kv.num_slots
