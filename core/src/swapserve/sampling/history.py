"""What a request asks of sampling and which tokens it holds, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swapserve.request import Request

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy decoding, as in vLLM: logits divided by it may overflow."""


class TokenCounts:
    """The distinct tokens of a request, and how often each is in its output, for penalties.

    Kept up to date token by token, so that a step's cost does not grow with a Python loop over the context. The
    prompt's tokens have a count of 0; they are left out where only the output matters.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self._num_prompt = self._size = len(distinct)
        self._ids = np.array(distinct + [0] * 64, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._output: list[int] = []

    def follow(self, output: list[int]) -> None:
        """Take over a request's output, counting only what is new; what it has taken back is uncounted."""
        known = len(self._output)
        if output[:known] != self._output:
            same = 0
            while same < min(known, len(output)) and output[same] == self._output[same]:
                same += 1
            while len(self._output) > same:
                self.pop()
        for token in output[len(self._output) :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Count one more output token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._counts[slot] = 0
            self._size += 1
        self._counts[slot] += 1
        self._output.append(token)

    def pop(self) -> None:
        """Uncount the newest output token."""
        token = self._output.pop()
        slot = self._slots[token]
        self._counts[slot] -= 1
        if slot >= self._num_prompt and self._counts[slot] == 0:  # what was added last is taken away first
            del self._slots[token]
            self._size -= 1

    def snapshot(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The distinct tokens and their counts in the output, `[m]` each, as copies."""
        return self._ids[: self._size].copy(), self._counts[: self._size].copy()


class Profile:
    """What one request asks of sampling, worked out once.

    undemanding: greedy, nothing changes its logits and no log-probabilities are wanted.
    truncates: only some of the tokens may be drawn (top_k, top_p or min_p).
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self.request = request
        self.params = params
        self.greedy = params.temperature < GREEDY_BELOW
        self.top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.truncates = self.top_k < vocab_size or params.top_p < 1 or params.min_p > 0
        repeats = params.repetition_penalty != 1
        self.counts: TokenCounts | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.counts = TokenCounts(request.prompt if repeats else ())
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self.stop_ids = np.array(sorted(request.stop_ids) if params.min_tokens else [], dtype=np.int64)
        self.undemanding = (
            self.greedy
            and self.counts is None
            and not len(self.bias_ids)
            and not len(self.stop_ids)
            and params.logprobs is None
        )
