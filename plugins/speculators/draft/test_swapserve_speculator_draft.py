"""The contract of every speculator, for `draft`, and what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from swapserve_speculator_draft import DraftModel

from swapserve import ModelInfo, OpenModel, PluginError
from swapserve.testing import SpeculatorContract, ghost_info, greedy


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


@pytest.mark.parametrize("length", [1, 3, 5])
def test_h37_a_draft_by_the_model_itself_is_accepted_whole_in_every_round(length: int) -> None:
    """H37: after a full acceptance the draft model's cache takes over the bonus token too."""
    contract = SpeculatorContract()
    contract.policy = DraftModel  # type: ignore[misc]
    contract.options = {"model": "ghost:1.0", "num_speculative_tokens": length}  # type: ignore[misc]
    engine = contract.engine(ghost_info(max_model_len=240, max_num_batched_tokens=64), num_blocks=80)
    seen: list[tuple[int, int]] = []
    observe = engine.speculator.observe
    engine.speculator.observe = lambda request, proposed, accepted: (  # type: ignore[method-assign, func-returns-value]
        seen.append((proposed, accepted)),
        observe(request, proposed, accepted),
    )[1]
    engine.submit([1, 2, 3], greedy(200))
    contract.finish(engine)
    assert len(seen) >= 199 // (length + 1) and all(proposed == accepted for proposed, accepted in seen)


def vocabulary(size: int, changed: Mapping[int, str] = {}) -> Mapping[str, int]:
    return {changed.get(index, f"token-{index}"): index for index in range(size)}


def opening(draft_size: int, draft_tokens: Mapping[str, int], target_size: int = 24) -> ModelInfo:
    """A target of `target_size` named tokens that opens a draft model with another vocabulary."""
    target = replace(ghost_info(), vocab_size=target_size, vocabulary=lambda: vocabulary(target_size))
    opened = ghost_info().open_model
    assert opened is not None
    draft = replace(target, vocab_size=draft_size, vocabulary=lambda: draft_tokens)
    return replace(target, open_model=lambda name: OpenModel(draft, opened("ghost:0.7").executor))


def test_h40_a_vocabulary_that_is_longer_by_padding_runs() -> None:
    """H40: ids without a token may be more; none of them is ever proposed."""
    speculator = DraftModel(DraftModel.Options(model="padded"), opening(32, vocabulary(24)))
    assert speculator.max_draft == 4


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
