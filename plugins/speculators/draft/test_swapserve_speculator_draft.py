"""The contract of every speculator, for `draft`, and what is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from swapserve_speculator_draft import BLOCK_SIZE, DraftModel

from swapserve import Batch, ModelInfo, OpenModel, PluginError, Request, SamplingParams, Verdict
from swapserve.testing import GhostExecutor, GhostModel, SpeculatorContract, ghost_info, greedy
from swapserve.testing.chance import (
    ChanceExecutor,
    chance_info,
    chance_table,
    chi_square,
    exact_probabilities,
    sample_outputs,
)
from swapserve.testing.ledger import make_request


class TestDraftModel(SpeculatorContract):
    policy = DraftModel
    options = {"model": "ghost:0.7"}


class TestDraftModelThatIsAlwaysRight(SpeculatorContract):
    policy = DraftModel
    options = {"model": "ghost:1.0", "num_speculative_tokens": 7}


class TestDraftModelWithALittleCache(SpeculatorContract):
    """With two blocks for everyone most requests get no draft, and none is harmed."""

    policy = DraftModel
    options = {"model": "ghost:0.7", "kv_cache_tokens": 32}


class Recorded(GhostExecutor):
    """A draft model's executor that notes every batch, and answers some with an error."""

    def __init__(self, num_blocks: int, block_size: int, model: GhostModel | None = None) -> None:
        super().__init__(num_blocks, block_size, model)
        self.batches: list[dict[str, tuple[int, int]]] = []
        self.drafted: set[int] = set()
        self.failing = ""

    def execute(self, batch: Batch) -> list[Verdict]:
        self.batches.append({work.slice.request.id: (work.slice.start, work.slice.count) for work in batch.works})
        for work in batch.works:
            assert all(token < self.model.vocab_size for token in work.token_ids), "a token that this model lacks"
        verdicts = super().execute(batch)
        self.drafted.update(token for verdict in verdicts for token in verdict.tokens)
        failed = [work.slice.request.id == self.failing for work in batch.works]
        return [Verdict(error="NaN") if bad else given for bad, given in zip(failed, verdicts, strict=True)]


def drafting(
    model: GhostModel | None = None,
    draft: GhostModel | None = None,
    *,
    length: int = 4,
    blocks: int = 60,
    **limits: int,
) -> tuple[DraftModel, Recorded, ModelInfo]:
    """A draft speculator on a recorded ghost, and what it may know of the served one."""
    model = model or GhostModel()
    draft = draft or GhostModel(model.vocab_size, agreement=0.7)
    served = ghost_info(model, **{"max_model_len": 240, "max_num_batched_tokens": 64, **limits})  # type: ignore[arg-type]
    executors: list[Recorded] = []

    def executor(num_blocks: int, block_size: int) -> Recorded:
        executors.append(Recorded(num_blocks, block_size, draft))
        return executors[-1]

    def names(info: ModelInfo) -> Mapping[str, int]:
        return vocabulary(min(draft.vocab_size, model.vocab_size))

    opened = replace(ghost_info(draft, max_model_len=served.max_model_len), vocabulary=lambda: names(served))
    served = replace(served, vocabulary=lambda: names(served), open_model=lambda name: OpenModel(opened, executor))
    options = DraftModel.Options(model="ghost", num_speculative_tokens=length, kv_cache_tokens=blocks * BLOCK_SIZE)
    return DraftModel(options, served), executors[0], served


def serve(speculator: DraftModel, info: ModelInfo, prompts: Sequence[Sequence[int]], count: int) -> list[Request]:
    """Serve prompts with it, hold the output against the served model's own, and return the requests."""
    contract = SpeculatorContract()
    contract.speculator = lambda _: speculator  # type: ignore[method-assign]
    engine = contract.engine(info, num_blocks=200)
    model = GhostModel(info.vocab_size)
    engine.executor.model = model  # type: ignore[attr-defined]
    requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
    contract.finish(engine)
    assert all(list(request.output) == model.continuation(request) for request in requests)
    return requests


def check_blocks(speculator: DraftModel) -> None:
    """Every block of its cache is free or in one table."""
    blocks = [*speculator._free, *(block for mirror in speculator._mirrors.values() for block in mirror.table)]
    assert sorted(blocks) == list(range(len(blocks))) == list(range(len(speculator._executor.slots) // BLOCK_SIZE))  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1, 3, 5])
def test_h37_a_draft_by_the_model_itself_is_accepted_whole_in_every_round(length: int) -> None:
    """H37: after a full acceptance the bonus token and the last drafted one are caught up with: two tokens."""
    speculator, executor, info = drafting(draft=GhostModel(), length=length)
    seen: list[tuple[int, int]] = []
    speculator.observe = lambda request, proposed, accepted: seen.append((proposed, accepted))  # type: ignore[method-assign]
    serve(speculator, info, [[1, 2, 3]], 200)
    assert len(seen) >= 199 // (length + 1) and all(proposed == accepted for proposed, accepted in seen)
    first_of_round = [count for batch in executor.batches[length::length] for _, count in batch.values()]
    assert set(first_of_round) == {2}
    check_blocks(speculator)
    assert len(speculator._free) == 60


def test_a_seeded_request_accepts_all_that_the_model_itself_drafts() -> None:
    """The client's seed gives both models the same draws, and so the output that it gives without drafts."""
    table = chance_table(8, 3)
    contract = TestDraftModel()
    outputs = []
    for draft_table, all_accepted in ((table, True), (chance_table(8, 4), False)):
        engine = contract.chance_engine(table)
        engine.speculator = DraftModel(DraftModel.Options(model="chance"), chance_info(table, draft_table))
        seen: list[tuple[int, int]] = []
        engine.speculator.observe = lambda request, *counts, seen=seen: seen.append(counts)  # type: ignore[method-assign, misc]
        request = engine.submit([1, 2], SamplingParams(temperature=0.9, seed=7, max_tokens=30))
        for _ in engine.run():
            pass
        assert all(proposed == accepted for proposed, accepted in seen) is all_accepted
        outputs.append(list(request.output))
    assert outputs[0] == outputs[1]


def test_a_long_prompt_is_caught_up_with_in_pieces_of_a_step() -> None:
    speculator, executor, _ = drafting(max_num_batched_tokens=16)
    requests = [make_request(name, [n % 20 for n in range(length)], 100) for name, length in (("a", 37), ("b", 5))]
    drafts = speculator.propose(requests)
    assert executor.batches[:3] == [{"a": (0, 16)}, {"a": (16, 16)}, {"a": (32, 5), "b": (0, 5)}]
    assert executor.batches[3:] == [{"a": (37 + n, 1), "b": (5 + n, 1)} for n in range(3)]
    assert [len(drafts[name]) for name in ("a", "b")] == [4, 4]


def test_one_without_room_to_grow_makes_room_for_others_and_comes_back_to_ample_room() -> None:
    speculator, _, _ = drafting(blocks=8, max_model_len=200)
    long, hog, small = (make_request(name, [1] * n, 190) for name, n in (("long", 26), ("hog", 80), ("small", 3)))
    assert speculator.propose([long, hog]).keys() == {"long", "hog"} and not speculator._free
    long.tokens += [1] * 20
    hog.tokens += [1] * 18
    assert speculator.propose([long, hog]).keys() == {"hog"} and len(speculator._free) == 1
    check_blocks(speculator)
    speculator.forget(hog)
    # Four of seven blocks would do for now, at the price of the whole text; it waits for twice as many.
    assert speculator.propose([small, long]).keys() == {"small"} and len(speculator._free) == 7
    speculator.forget(small)
    assert speculator.propose([long]).keys() == {"long"} and len(speculator._free) == 4
    check_blocks(speculator)


def test_h50_a_draft_model_whose_numbers_are_no_good_is_asked_no_more_for_that_request() -> None:
    speculator, executor, _ = drafting()
    bad, good = make_request("bad", [1] * 9, 60), make_request("good", [2] * 9, 60)
    executor.failing = "bad"
    for _ in range(3):
        assert speculator.propose([bad, good]).keys() == {"good"}
        good.tokens += [3]
        bad.tokens += [3]
        check_blocks(speculator)
    assert sum("bad" in batch for batch in executor.batches) == 1
    speculator.forget(bad)
    executor.failing = ""
    assert speculator.propose([bad, good]).keys() == {"bad", "good"}


def test_past_the_draft_models_context_there_is_no_draft_and_no_block() -> None:
    speculator, _, _ = drafting(max_model_len=32)
    request = make_request("long", [1] * 29, 200)
    assert len(speculator.propose([request])["long"]) == 3
    request.tokens += [1] * 4
    assert not speculator.propose([request]) and len(speculator._free) == 60


def vocabulary(size: int, changed: Mapping[int, str] = {}) -> Mapping[str, int]:
    return {changed.get(index, f"token-{index}"): index for index in range(size)}


def opening(draft_size: int, draft_tokens: Mapping[str, int], target_size: int = 24) -> ModelInfo:
    """A target of `target_size` named tokens that opens a draft model with another vocabulary."""
    target = replace(ghost_info(), vocab_size=target_size, vocabulary=lambda: vocabulary(target_size))
    opened = ghost_info().open_model
    assert opened is not None
    draft = replace(target, vocab_size=draft_size, vocabulary=lambda: draft_tokens)
    return replace(target, open_model=lambda name: OpenModel(draft, opened("ghost:0.7").executor))


@pytest.mark.parametrize("seed", range(4))
def test_h40_a_vocabulary_that_is_longer_by_padding_runs(seed: int) -> None:
    """H40: ids without a token may be more; a draft ends before the first of them."""
    speculator, executor, info = drafting(GhostModel(24), GhostModel(32, seed=seed))
    serve(speculator, info, [[1, 2, 3], [seed, seed]], 40)
    assert max(executor.drafted) >= 24, "no id was drafted that the served model lacks"


def test_h40_sampled_output_keeps_its_distribution_where_padding_is_drafted() -> None:
    """A draft that ends at an id the served model lacks says nothing of what the served model draws there."""
    table, wide = chance_table(5, 1) * 1.5, chance_table(8, 2)
    served = replace(chance_info(table), vocabulary=lambda: vocabulary(5))
    opened = OpenModel(replace(served, vocab_size=8), lambda num_blocks, block_size: ChanceExecutor(wide))
    speculator = DraftModel(DraftModel.Options(model="wide"), replace(served, open_model=lambda name: opened))
    params = SamplingParams(max_tokens=4)
    outputs = sample_outputs(speculator, table, [1, 2], params, 4000, seed=5)
    assert chi_square([output[:3] for output in outputs], exact_probabilities(table, 2, 3, params)) > 0.001


def test_h40_a_vocabulary_that_is_shorter_by_padding_runs() -> None:
    """A request with an id that the draft model lacks gets no draft, from that token on; the others do."""
    speculator, executor, info = drafting(GhostModel(24), GhostModel(16))
    serve(speculator, info, [[1, 2, 23], [1, 2, 3]], 20)
    assert all("req-0" not in batch for batch in executor.batches) and any(
        "req-1" in batch for batch in executor.batches
    )
    biased = SamplingParams(logit_bias={3: 1.0, 20: 5.0})
    request = Request("biased", (1, 2), biased, max_len=40)
    assert speculator.propose([request]).keys() == {"biased"}
    assert speculator._mirrors["biased"].request.params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    ("size", "tokens", "message"),
    [
        (32, vocabulary(32), r"32 tokens and the served model's 24; token 24 is 'token-24' there and None here"),
        (24, vocabulary(24, {7: "other"}), r"24 tokens .* 24; token 7 is 'other' there and 'token-7' here"),
        (16, vocabulary(16), r"16 tokens and the served model's 24"),
    ],
)
def test_h40_another_vocabulary_is_refused(size: int, tokens: Mapping[str, int], message: str) -> None:
    """H40: the sentence names both sizes and the first token that differs."""
    with pytest.raises(PluginError, match=message):
        DraftModel(DraftModel.Options(model="other"), opening(size, tokens))


def test_sizes_alone_decide_where_no_tokenizer_is_known() -> None:
    target = replace(opening(23, {}), vocabulary=None)
    with pytest.raises(PluginError, match="23 tokens and the served model's 24; choose a draft model"):
        DraftModel(DraftModel.Options(model="other"), target)


def test_an_engine_that_opens_no_second_model_is_named() -> None:
    with pytest.raises(PluginError, match="cannot open a second model"):
        DraftModel(DraftModel.Options(model="any"), replace(ghost_info(), open_model=None))
