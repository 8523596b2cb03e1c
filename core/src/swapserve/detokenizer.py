"""Text as it comes, token by token: whole characters only, and nothing of a stop string.

A token that stands for bytes goes through an incremental UTF-8 decoder, which waits for the rest of a character and
puts U+FFFD for what never becomes one. For any other token, decoding a window of the last tokens twice, with and
without the new one, gives the text the new one adds; the window keeps what joins tokens (spaces) right.

So a wrong byte costs no character beside it. SentencePiece's own decoder gives up every byte token of a run that holds
a wrong one, also those already shown; a stream cannot take text back, and answers that are not streamed say the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from swapserve.params import SamplingParams
from swapserve.request import FinishReason, Output, TokenLogprobs
from swapserve.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Tokens before the new ones that a window begins with: enough for every rule that joins tokens."""
MAX_HELD_TOKENS = 8
"""No character is made of more tokens than this: what is still no character then never will be."""
REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class Chunk:
    """What one step gave one request, as text."""

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    offsets: Sequence[int] = ()
    """Where each token's text begins in the output."""
    finish_reason: FinishReason | None = None
    error: str | None = None


@final
class TextStream:
    """The text of one request's output.

    `push` returns the text that is certain; `finish` the rest. When a stop string has come, `stopped` is true,
    nothing after it is ever returned, and `num_tokens` says how many tokens were used.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self.stopped = False
        self.num_tokens = 0
        self.offsets: list[int] = []
        """Where each token's text begins in the output."""
        self._tokenizer, self._params = tokenizer, params
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._ids)
        self._before = "" if tokenizer.byte_level else self._decode(self._ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._held = ""
        """Decoded, and perhaps the beginning of a stop string."""

    def take(self, output: Output) -> Chunk:
        """What a step gave, as text. A stop string ends the request here, and the tokens after it are dropped."""
        before, reason = self.num_tokens, output.finish_reason
        # The token that ends a request is counted and has no place in its text.
        unseen = 1 if reason is FinishReason.STOP and not self._params.include_stop_str_in_output else 0
        text = self.push(output.tokens[: len(output.tokens) - unseen])
        if unseen and not self.stopped:
            self.num_tokens += 1
            self.offsets.append(self._length)
        if reason is not None:
            text += self.finish()
        if self.stopped and reason in (None, FinishReason.LENGTH):
            reason = FinishReason.STOP
        taken = self.num_tokens - before
        return Chunk(
            text=text,
            tokens=output.tokens[:taken],
            logprobs=None if output.logprobs is None else output.logprobs[:taken],
            offsets=self.offsets[before:],
            finish_reason=reason,
            error=output.error,
        )

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        if self.stopped:
            return ""
        pieces = []
        for token in tokens:
            self.num_tokens += 1
            self.offsets.append(self._length)
            pieces.append(self._guard(self._add(token)))
            if self.stopped:
                break
        return "".join(pieces)

    def finish(self) -> str:
        """The text that was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._guard(self._flush())
        if self.stopped:
            return rest
        held, self._held = self._held, ""
        return rest + held

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._params.skip_special_tokens)

    def _add(self, token: int) -> str:
        """The text that a token makes certain."""
        data = self._tokenizer.token_bytes(token, self._params.skip_special_tokens)
        if data is not None:
            added = self._flush_window() + self._utf8.decode(data)
            if not self._tokenizer.byte_level:
                self._ids.append(token)
                self._advance(self._decode(self._ids))
        else:
            added = self._utf8.decode(b"", True)
            self._ids.append(token)
            text = self._decode(self._ids)
            # Decoders that are made of other steps may still give half a character: it waits for the next token.
            if not text.endswith(REPLACEMENT) or len(self._ids) - self._read >= MAX_HELD_TOKENS:
                added += self._advance(text)
        self._length += len(added)
        return added

    def _flush(self) -> str:
        added = self._flush_window() + self._utf8.decode(b"", True)
        self._length += len(added)
        return added

    def _flush_window(self) -> str:
        return self._advance(self._decode(self._ids)) if self._read < len(self._ids) else ""

    def _advance(self, text: str) -> str:
        """Take over a decoded window: what it adds is out, and the next window begins with its last tokens."""
        added = text[len(self._before) :]
        del self._ids[:-CONTEXT_TOKENS]
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return added

    def _guard(self, added: str) -> str:
        """Let through what cannot belong to a stop string any more; end at the first stop string."""
        stops = self._params.stop
        if not stops or self.num_tokens <= self._params.min_tokens:
            held, self._held = self._held, ""
            return held + added
        text = self._held + added
        found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            position, stop = found
            return text[: position + len(stop) if self._params.include_stop_str_in_output else position]
        keep = max(_overlap(text, stop) for stop in stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
