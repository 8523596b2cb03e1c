"""The contract of every KV manager, for `paged`, and what is its own."""

from __future__ import annotations

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
