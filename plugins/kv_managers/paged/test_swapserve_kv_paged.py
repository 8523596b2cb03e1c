"""The contract of every KV manager, for `paged`, and what is its own."""

from __future__ import annotations

import pytest
from swapserve_kv_paged import Paged

from swapserve.testing import KVManagerContract
from swapserve.testing.ledger import make_request


class TestPaged(KVManagerContract):
    policy = Paged


def test_blocks_are_taken_on_demand_and_a_rejected_drafts_go_back() -> None:
    kv = Paged(Paged.Options(block_size=4), 40)
    request = make_request("one", [1] * 5, 40)
    assert kv.reserve(request, 0, 5) and len(kv.table(request)) == 2
    request.computed = 5
    request.tokens.append(1)
    assert kv.reserve(request, 0, 6 + 9) and len(kv.table(request)) == 4 and kv.usage() == 0.4
    request.tokens.append(1)
    request.computed = 6
    kv.commit(request)
    assert len(kv.table(request)) == 2 and kv.usage() == 0.2


def test_slots_that_fill_no_block_are_not_counted() -> None:
    kv = Paged(Paged.Options(block_size=4), 11)
    assert kv.num_slots == kv.longest() == 8
    assert not kv.fits(make_request("nine", [1] * 9, 10), 0, 9) and kv.fits(make_request("eight", [1] * 8, 9), 0, 8)


def test_the_check_sees_books_that_disagree() -> None:
    kv = Paged(Paged.Options(block_size=4), 40)
    one, two = make_request("one", [1] * 8, 9), make_request("two", [2] * 8, 9)
    assert kv.reserve(one, 0, 8) and kv.reserve(two, 0, 8)
    kv.check()
    kv._free.append(kv.table(one)[0])
    with pytest.raises(AssertionError, match="in two places"):
        kv.check()
