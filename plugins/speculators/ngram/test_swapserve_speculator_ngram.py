"""The contract of every speculator, for `ngram`, and what is its own."""

from __future__ import annotations

from typing import Any

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


class Counted(list[int]):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_reads_what_is_new_however_long_the_context_is() -> None:
    speculator = ngram()
    request = make_request("long", [n * n % 97 for n in range(3000)], 4000)
    request.tokens = tokens = Counted(request.tokens)
    speculator.propose([request])
    tokens.num_read = 0
    for number in range(50):
        tokens.append(number)
        speculator.propose([request])
    # Suffixes of two to four tokens are indexed and looked up, and four tokens proposed.
    assert tokens.num_read <= 50 * (9 + 9 + 4)
