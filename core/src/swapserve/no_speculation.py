"""The speculator that proposes nothing: what runs unless another is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from swapserve.hookspecs import hookimpl
from swapserve.policies import Speculator
from swapserve.request import Draft, Request


@final
class NoSpeculation(Speculator):
    """Every token comes from the model, one a step."""

    name = "none"
    max_draft = 0

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        return {}


@hookimpl
def swapserve_register_speculator() -> type[Speculator]:
    return NoSpeculation
