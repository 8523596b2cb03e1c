"""The contract of every KV manager, for `contiguous`, and what is its own."""

from __future__ import annotations

import pytest
from swapserve_kv_contiguous import Contiguous

from swapserve.testing import KVManagerContract
from swapserve.testing.ledger import make_request


class TestContiguous(KVManagerContract):
    policy = Contiguous


def test_a_run_is_held_for_the_greatest_length_and_free_runs_are_used_first_fit() -> None:
    kv = Contiguous(Contiguous.Options(block_size=4), 40)
    requests = [make_request(str(n), [1], length) for n, length in enumerate((13, 9, 13))]
    assert all(kv.reserve(request, 0, 1) for request in requests)
    assert [list(kv.table(request)) for request in requests] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert kv.usage() == 0.8
    kv.free(requests[1])
    assert not kv.fits(make_request("long", [1], 17), 0, 1), "four blocks are free, but not side by side"
    small = make_request("small", [1], 5)
    assert kv.reserve(small, 0, 1) and list(kv.table(small)) == [3]


def test_slots_that_fill_no_block_are_not_counted() -> None:
    kv = Contiguous(Contiguous.Options(block_size=4), 11)
    assert kv.num_slots == kv.longest() == 8
    assert not kv.fits(make_request("nine", [1] * 9, 10), 0, 9) and kv.fits(make_request("eight", [1] * 8, 9), 0, 8)


def test_the_check_sees_books_that_disagree() -> None:
    kv = Contiguous(Contiguous.Options(block_size=4), 40)
    one, two = make_request("one", [1] * 8, 9), make_request("two", [2] * 8, 9)
    assert kv.reserve(one, 0, 8) and kv.reserve(two, 0, 8)
    kv.check()
    kv._runs["two"] = range(1, 3)
    with pytest.raises(AssertionError, match="overlap"):
        kv.check()
