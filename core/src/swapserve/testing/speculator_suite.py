"""The contract of a speculator, as tests to inherit.

class TestMine(SpeculatorContract):
    policy = MySpeculator
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest

from swapserve.engine import Engine
from swapserve.params import SamplingParams
from swapserve.policies import ModelInfo, Speculator
from swapserve.request import Draft
from swapserve.testing.chance import (
    chance_info,
    chance_table,
    chi_square,
    exact_probabilities,
    random_prompt,
    sample_outputs,
)
from swapserve.testing.driver import Driver
from swapserve.testing.ghost import GhostExecutor, GhostModel, ghost_info, greedy
from swapserve.testing.ledger import make_request
from swapserve.testing.simple import SimpleKV, SimpleScheduler, combinations
from swapserve.testing.soundness import check_engine, check_idle, snapshot
from swapserve.testing.workloads import make_workload
from swapserve.testing.wrappers import WatchedKV, WatchedSpeculator


class SpeculatorContract:
    """What every speculator must do, whatever it is combined with."""

    policy: ClassVar[type[Speculator]]
    options: ClassVar[dict[str, Any]] = {}
    """For one that opens a model: `{"model": "ghost:0.7"}`, a ghost that is right at 70 % of positions."""
    num_workloads: ClassVar[int] = 60
    num_samples: ClassVar[int] = 3000

    def speculator(self, info: ModelInfo) -> Speculator:
        return self.policy(self.policy.Options(**self.options), info)

    def engine(self, info: ModelInfo, num_blocks: int = 60) -> Engine:
        return Engine(
            executor=GhostExecutor(num_blocks, 4),
            scheduler=SimpleScheduler(SimpleScheduler.Options()),
            kv=WatchedKV(SimpleKV(SimpleKV.Options(block_size=4), num_blocks * 4)),
            speculator=WatchedSpeculator(self.speculator(info)),
            model=info,
        )

    def finish(self, engine: Engine) -> None:
        for _ in range(2000):
            if not engine.has_work:
                return check_idle(engine)
            engine.step()
            check_engine(engine)
        raise AssertionError(f"{self.policy.name}: no end")

    def test_every_partner_gives_the_same_tokens(self) -> None:
        """With every installed scheduler and KV manager: the output is the same with drafts as without."""
        for seed in range(self.num_workloads):
            for combination in combinations("speculator", self.policy, self.options, seed):
                workload = make_workload(seed)
                try:
                    Driver(combination.engine(workload), workload).run()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, {combination}: {error}") from error

    def test_writes_to_no_request_and_keeps_to_its_limits(self) -> None:
        for seed in range(self.num_workloads):
            workload = make_workload(seed)
            engine = next(combinations("speculator", self.policy, self.options, seed)).engine(workload)
            engine.speculator = WatchedSpeculator(engine.speculator)
            Driver(engine, workload).run()

    def test_no_requests_no_drafts(self) -> None:
        assert dict(self.speculator(ghost_info()).propose([])) == {}

    def test_survives_what_it_never_saw(self) -> None:
        """`observe` and `forget` of an unknown request, `forget` twice, and a request that comes back shorter."""
        speculator = WatchedSpeculator(self.speculator(ghost_info()))
        request = make_request("known", [1, 2, 3, 1, 2, 3, 1, 2], 40)
        request.computed = 7
        speculator.forget(request)
        speculator.observe(request, 2, 1)
        for _ in range(2):
            speculator.propose([request])
            speculator.forget(request)
            speculator.forget(request)
        shorter = make_request("known", [1, 2, 3, 1], 40)
        shorter.computed = 3
        speculator.propose([shorter])

    def test_asking_twice_is_harmless(self) -> None:
        """A draft that was never verified (preempted, no room) is forgotten; later output is unharmed."""
        info = ghost_info(max_model_len=60)
        engine = self.engine(info)
        request = engine.submit([1, 2, 3, 4], greedy(30))
        model = GhostModel()
        while engine.has_work:
            engine.step()
            if not request.finished:
                before = snapshot(request)
                engine.speculator.propose([request])
                assert snapshot(request) == before
        assert list(request.output) == model.continuation(request)

    def test_h16_abort_and_preemption_at_every_stage(self) -> None:
        for stage in range(10):
            engine = self.engine(ghost_info(max_num_seqs=3, max_model_len=40), num_blocks=14)
            requests = [engine.submit([n, 1, n, 1] * 3, greedy(16)) for n in (2, 3, 4)]
            for _ in range(stage):
                engine.step()
            engine.abort(requests[stage % 3].id)
            engine.abort(requests[stage % 3].id)
            self.finish(engine)

    def test_h17_the_first_draft_token_is_verified(self) -> None:
        """H17: a draft of one wrong token, after a prompt that repeats one token, changes nothing."""
        for token in range(8):
            engine = self.engine(ghost_info(max_model_len=40))
            request = engine.submit([token] * 3, greedy(20))
            self.finish(engine)
            assert list(request.output) == GhostModel().continuation(request)

    def test_h38_no_draft_past_the_limit(self) -> None:
        """H38: context 64, prompt 60: four tokens, `length`, and no slot at or past 64 is ever touched."""
        for max_tokens, expected in ((None, 4), (2, 2)):
            info = ghost_info(max_model_len=64, max_num_batched_tokens=64)
            engine = self.engine(info)
            request = engine.submit([1, 2, 3] * 20, greedy(max_tokens))
            while engine.has_work:
                engine.step()
                for piece in engine.last_plan.slices.values() if engine.last_plan else ():
                    assert piece.end <= 60 + expected - 1, "a position was computed that could be of no use"
            assert request.num_output_tokens == expected

    def test_a_full_answer_is_not_longer_than_the_room_left(self) -> None:
        info = ghost_info(max_model_len=64)
        speculator = self.speculator(info)
        for room in range(0, 4):
            request = make_request(f"room-{room}", [1, 2] * 8, 17 + room)
            request.computed = 15
            draft = speculator.propose([request]).get(request.id, Draft(()))
            assert len(draft.cut(request.draft_room) or ()) <= room

    @pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
    def test_sampled_output_keeps_its_distribution(self, fields: dict[str, float]) -> None:
        """With drafts, sampled output is distributed exactly as the model alone says: chi-square over three tokens."""
        params = SamplingParams.model_validate({"max_tokens": 4, **fields})
        for seed, noise in ((1, 0.3), (2, 1.5)):
            p_value = self.chance(params, seed, noise)
            assert p_value > 0.001, f"{self.policy.name}: p = {p_value:.2g} at {params}, draft noise {noise}"

    def chance(self, params: SamplingParams, seed: int, noise: float) -> float:
        """The p-value of the first three tokens after one prompt, against their exact probabilities."""
        table = chance_table(5, seed) * 1.5
        info = chance_info(table, chance_table(5, seed + 100, like=table, noise=noise))
        prompt = random_prompt(5, seed)
        outputs = sample_outputs(self.speculator(info), table, prompt, params, self.num_samples, seed)
        expected = exact_probabilities(table, prompt[-1], 3, params)
        return chi_square([output[:3] for output in outputs], expected)

    def test_h48_a_seed_gives_the_same_tokens_whatever_runs_beside(self) -> None:
        """H48: one seeded request alone, and among others that come and go: the same tokens each time."""
        table = chance_table(8, 3)
        rng = random.Random(48)
        seen = set()
        for others in (0, 7, 7, 20):
            engine = self.chance_engine(table)
            params = SamplingParams(temperature=0.8, seed=42, max_tokens=12)
            for _ in range(others // 2):
                engine.submit([rng.randrange(8)] * 3, SamplingParams(max_tokens=rng.randint(1, 9)))
            request = engine.submit([1, 2, 1, 2, 1], params)
            for _ in range(others - others // 2):
                engine.submit([rng.randrange(8)] * 3, SamplingParams(max_tokens=rng.randint(1, 9)))
            for _ in engine.run():
                pass
            seen.add(tuple(request.output))
        assert len(seen) == 1, f"{self.policy.name}: one seed gave {len(seen)} different outputs"

    def chance_engine(self, table: Any) -> Engine:
        from swapserve.testing.chance import ChanceExecutor

        info = chance_info(table, chance_table(table.shape[0], 77, like=table, noise=0.5))
        kv = SimpleKV(SimpleKV.Options(block_size=8), 8 * 200)
        return Engine(
            executor=ChanceExecutor(table),
            scheduler=SimpleScheduler(SimpleScheduler.Options()),
            kv=kv,
            speculator=self.speculator(info),
            model=info,
        )

    def test_name_and_length(self) -> None:
        speculator = self.speculator(ghost_info())
        assert speculator.name and "," not in speculator.name and "=" not in speculator.name
        assert speculator.max_draft >= 0
