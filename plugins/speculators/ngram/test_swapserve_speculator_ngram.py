"""The contract of every speculator, for `ngram`, and what is its own."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from swapserve_speculator_ngram import Ngram

from swapserve.testing import SpeculatorContract, ghost_info
from swapserve.testing.ledger import make_request


class TestNgram(SpeculatorContract):
    policy = Ngram


def ngram(**options: int) -> Ngram:
    return Ngram(Ngram.Options(**options), ghost_info())


def proposed(speculator: Ngram, tokens: list[int], name: str = "one", max_len: int = 60) -> tuple[int, ...]:
    draft = speculator.propose([make_request(name, tokens, max_len)]).get(name)
    return draft.tokens if draft else ()


def test_the_longest_suffix_wins_and_of_its_occurrences_the_latest() -> None:
    tokens = [1, 2, 3, 9, 9, 7, 2, 3, 5, 5, 2, 3, 4, 4, 1, 2, 3]
    assert proposed(ngram(prompt_lookup_max=3), tokens) == (9, 9, 7, 2)
    assert proposed(ngram(prompt_lookup_max=2), tokens) == (4, 4, 1, 2)
    assert proposed(ngram(), [1, 2, 3, 4, 5]) == ()


def test_a_loop_shorter_than_a_draft_fills_it() -> None:
    assert proposed(ngram(num_speculative_tokens=5), [1, 2, 1, 2]) == (1, 2, 1, 2, 1)
    assert proposed(ngram(prompt_lookup_min=1), [1, 1, 1]) == (1, 1, 1, 1)


def test_the_index_grows_with_the_request_and_is_dropped_with_it() -> None:
    speculator = ngram(num_speculative_tokens=2)
    tokens = [1, 2, 3, 1]
    assert proposed(speculator, tokens) == ()
    assert proposed(speculator, [*tokens, 2]) == (3, 1)
    speculator.forget(make_request("one", tokens, 60))
    assert proposed(speculator, [5, 5]) == ()


def test_the_draft_is_cut_to_the_room_left() -> None:
    assert proposed(ngram(), [1, 2, 1, 2], max_len=7) == (1, 2)
    assert proposed(ngram(), [1, 2, 1, 2], max_len=5) == ()


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="shortest may not be longer"):
        Ngram.Options(prompt_lookup_min=5, prompt_lookup_max=3)
