"""Prompt lookup (Saxena 2023; vLLM's `ngram`): what followed the last few tokens before will follow them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from pydantic import Field, model_validator

from swapserve import Draft, ModelInfo, PolicyOptions, Request, Speculator, hookimpl


class _Index:
    """Where each n-gram of a request's tokens was seen last, kept up to date token by token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.size = 0
        self.ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in self.lengths}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that end before the last token: the newest suffix must not find itself."""
        for end in range(max(self.size, 1), len(tokens)):
            for length in self.lengths:
                if length <= end:
                    self.ends[length][tuple(tokens[end - length : end])] = end
        self.size = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position after the most recent earlier occurrence of the longest known suffix."""
        for length in self.lengths:
            if length < len(tokens):
                end = self.ends[length].get(tuple(tokens[-length:]))
                if end is not None:
                    return end
        return None


@final
class Ngram(Speculator):
    """Proposes the tokens that followed the most recent earlier occurrence of the longest matching suffix.

    Costs no model and almost no time: each token is indexed once, however long the context grows.
    """

    name = "ngram"

    class Options(PolicyOptions):
        num_speculative_tokens: int = Field(4, ge=1, le=64, description="longest draft")
        prompt_lookup_max: int = Field(4, ge=1, le=32, description="longest suffix looked up")
        prompt_lookup_min: int = Field(2, ge=1, le=32, description="shortest suffix looked up")

        @model_validator(mode="after")
        def _in_order(self) -> Ngram.Options:
            if self.prompt_lookup_min > self.prompt_lookup_max:
                raise ValueError(
                    f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}: "
                    "the shortest may not be longer than the longest"
                )
            return self

    def __init__(self, options: Options, target: ModelInfo) -> None:
        super().__init__(options, target)
        self.max_draft = options.num_speculative_tokens
        self._shortest, self._longest = options.prompt_lookup_min, options.prompt_lookup_max
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Draft]:
        drafts = {}
        for request in requests:
            index = self._indexes.get(request.id)
            if index is None or index.size > len(request.tokens):
                index = self._indexes[request.id] = _Index(self._shortest, self._longest)
            index.extend(request.tokens)
            start = index.find(request.tokens)
            length = min(self.max_draft, request.draft_room)
            if start is not None and length:
                drafts[request.id] = Draft(_continuation(request.tokens, start, length))
        return drafts

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)


def _continuation(tokens: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """`length` tokens from `start` on; past the end the text goes round: a loop shorter than a draft fills it."""
    period = len(tokens) - start
    return tuple(tokens[start + offset % period] for offset in range(length))


@hookimpl
def swapserve_register_speculator() -> type[Speculator]:
    return Ngram
