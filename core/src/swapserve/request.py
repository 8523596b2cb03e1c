"""A request as the loop sees it: tokens that are verified, a draft that is not, and how much has its KV stored.

There is no prefill phase and no decode phase. A step computes the next *pending* positions of
`tokens + draft` for some requests; a slice that reaches the last verified token samples. Chunked
prompts, prefix hits, speculation and preemption are all ways of moving `computed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from swapserve.params import SamplingParams

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API, and `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens a speculator proposes to follow a request's verified tokens.

    `probs` is `[len(tokens), vocab]`, the distribution each token was drawn from;
    None means that each was drawn with certainty (a look-up, or a greedy draft model).
    """

    tokens: tuple[int, ...]
    probs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Draft | None:
        """The first `length` tokens of this draft; None when nothing is left."""
        if length >= len(self.tokens):
            return self
        if length <= 0:
            return None
        return Draft(self.tokens[:length], None if self.probs is None else self.probs[:length])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token and of the most likely tokens at its position, most likely first.

    A probability of zero is written as `LOGPROB_FLOOR`: JSON has no infinity.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


LOGPROB_FLOOR = -9999.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to an answer. Policies read it; only the engine and the plan write to it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    """Lower runs first, where a scheduler looks at it."""
    cache_salt: str | None = None
    """Isolates the prefix cache between tenants: requests share blocks only under one salt."""
    max_len: int = 0
    """Prompt and output never grow past this many tokens; set at submit."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the request: the model's end tokens and the client's; set at submit."""
    seed: int = 0
    """The seed of this request's draws: the client's, or one of the engine's; set at submit."""

    tokens: list[int] = field(default_factory=list)
    """The prompt and the verified output."""
    draft: Draft | None = None
    """Proposed and unverified."""
    computed: int = 0
    """How many leading tokens have their KV stored."""
    cached_tokens: int | None = None
    """How many prompt tokens came from the prefix cache and were never computed; None before admission."""
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One entry a prompt token, the first None; filled while the prompt is computed, when asked for."""
    first_scheduled: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)

    @property
    def pending(self) -> int:
        """Positions of `tokens + draft` that are not computed yet."""
        return len(self.tokens) + (len(self.draft) if self.draft else 0) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether more than the newest token is waiting for its KV: a prompt, or a preempted request coming back."""
        return len(self.tokens) - self.computed > 1

    @property
    def output(self) -> Sequence[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def draft_room(self) -> int:
        """How many draft tokens could still be of use: the token after the last draft is sampled anyway."""
        return max(0, self.max_len - len(self.tokens) - 1)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still owed, so that every prompt position must be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    def accept(self, tokens: Sequence[int]) -> int:
        """Append verified tokens up to the first that ends the request; return how many were taken.

        The draft is gone afterwards, and the newest token has no KV yet: that is the only rollback there is.
        """
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if token in self.stop_ids and self.num_output_tokens > self.params.min_tokens:
                self.finish_reason = FinishReason.STOP
                break
            if len(self.tokens) >= self.max_len:
                self.finish_reason = FinishReason.LENGTH
                break
        self.draft = None
        self.computed = len(self.tokens) - 1
        return taken


@dataclass(slots=True)
class Output:
    """What one step (or an abort) gave one request: its new tokens and, once, why it ended."""

    request: Request
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class RequestRefused(ValueError):
    """The request can never run or asks for something impossible; the message says what to change.

    `param` is the name of the offending field, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
