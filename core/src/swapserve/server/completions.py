"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swapserve.async_engine import Stream
from swapserve.detokenizer import Chunk, TextStream
from swapserve.params import SamplingParams
from swapserve.request import RequestRefused, TokenLogprobs
from swapserve.server import answers
from swapserve.server.protocol import CompletionRequest
from swapserve.server.state import JOBS_AT_ONCE, ServerState, read_body, state_of
from swapserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Call:
    """One call: its prompts and its choices, `n` a prompt."""

    body: CompletionRequest
    state: ServerState
    model: str
    texts: Sequence[str]
    """The prompts as text, for echo."""
    streams: Sequence[Stream]
    given: list[int]
    """Tokens of each stream that were handed on."""

    @property
    def drops_output(self) -> bool:
        """Whether only the prompt is asked for: max_tokens 0 with echo."""
        return self.body.max_tokens == 0

    def choice(self, index: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """A choice, or the part of one that a chunk holds; the first part carries the echo."""
        stream, echo = self.streams[index], self.body.echo and first
        self.given[index] += len(chunk.tokens)
        text = "" if self.drops_output else chunk.text
        made: dict[str, Any] = {
            "index": index,
            "text": self.texts[index // self.body.n] + text if echo else text,
            "logprobs": self._logprobs(index, chunk, echo),
            "finish_reason": chunk.finish_reason and ("length" if self.drops_output else chunk.finish_reason.value),
        }
        if self.body.return_token_ids:
            made["token_ids"] = [] if self.drops_output else list(chunk.tokens)
            if first:
                made["prompt_token_ids"] = list(stream.prompt)
        if first and self.body.prompt_logprobs is not None and stream.request is not None:
            made["prompt_logprobs"] = answers.vllm_prompt_logprobs(self.state.tokenizer, stream.request.prompt_logprobs)
        return made

    def usage(self) -> dict[str, Any]:
        return answers.usage(self.streams, len(self.texts), 0 if self.drops_output else sum(self.given))

    def _logprobs(self, index: int, chunk: Chunk, echo: bool) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        stream, prompt = self.streams[index], self.texts[index // self.body.n]
        entries: list[TokenLogprobs | None] = [] if self.drops_output else list(chunk.logprobs or ())
        tokens = [] if self.drops_output else list(chunk.tokens)
        offsets = [] if self.drops_output else [len(prompt) + offset for offset in chunk.offsets]
        if echo and stream.request is not None:
            entries = [*stream.request.prompt_logprobs, *entries]
            tokens = [*stream.prompt, *tokens]
            offsets = [*_prompt_offsets(self.state.tokenizer, stream.prompt, prompt), *offsets]
        text = self.state.tokenizer.token_text
        return {
            "tokens": [text(token) for token in tokens],
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry is None else {text(token): logprob for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }


async def completions(request: Request) -> Response:
    """Answer one or several prompts, `n` times each, at once or as a stream."""
    state = state_of(request)
    body = await read_body(request, CompletionRequest, state.max_body_bytes)
    model = state.check_model(body.model)
    prompts = body.prompts()
    ids = [await _encoded(state, body, prompt, index, len(prompts)) for index, prompt in enumerate(prompts)]
    texts = [
        prompt if isinstance(prompt, str) else state.tokenizer.decode(prompt, skip_special_tokens=True)
        for prompt in prompts
    ] if body.echo else [""] * len(prompts)  # fmt: skip
    jobs = [(prompt, _params(body, choice)) for prompt in ids for choice in range(body.n)]
    call = Call(body, state, model, texts, await state.submit_all(jobs, body), [0] * len(jobs))
    if body.stream:
        return answers.sse(request, state, call.streams, _events(call))
    chunks = await answers.gather(request, state, call.streams)
    choices = [call.choice(index, answers.joined(made), first=True) for index, made in enumerate(chunks)]
    return JSONResponse(
        {**answers.envelope("cmpl", "text_completion", model), "choices": choices, "usage": call.usage()}
    )


async def _events(call: Call) -> AsyncIterator[bytes]:
    head = answers.envelope("cmpl", "text_completion", call.model)
    begun = [False] * len(call.streams)
    options = call.body.stream_options
    running_usage = options is not None and options.continuous_usage_stats
    async for index, chunk in answers.readable(call.streams):
        data = {**head, "choices": [call.choice(index, chunk, first=not begun[index])]}
        begun[index] = True
        if running_usage:
            data["usage"] = call.usage()
        yield answers.event(data)
    if options is not None and options.include_usage:
        yield answers.event({**head, "choices": [], "usage": call.usage()})


async def _encoded(state: ServerState, body: CompletionRequest, prompt: Any, index: int, count: int) -> list[int]:
    """Token ids of one prompt; an empty one is refused, with its place in a list."""
    if index % JOBS_AT_ONCE == JOBS_AT_ONCE - 1:
        await asyncio.sleep(0)
    ids = prompt if isinstance(prompt, list) else await state.encode(prompt, body.add_special_tokens)
    if not ids:
        where = f"prompt {index} of the list" if count > 1 else "the prompt"
        raise RequestRefused(f"{where} is empty: give at least one token", "prompt")
    return list(ids)


def _prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text; a BOS that is not written there has no length."""
    unseen = 0
    if tokenizer.bos_token_id == prompt[0] and not text.startswith(tokenizer.token_text(prompt[0])):
        unseen = 1
    for skip in (False, True):
        # A prompt given as ids is echoed without its special tokens, one given as text as it was written.
        made = TextStream(tokenizer, prompt[:unseen], SamplingParams(skip_special_tokens=skip))
        if made.push(prompt[unseen:]) + made.finish() == text:
            break
    return [0] * unseen + [min(offset, len(text)) for offset in made.offsets]


def _params(body: CompletionRequest, choice: int) -> SamplingParams:
    given: dict[str, Any] = {"logprobs": body.logprobs, "max_tokens": body.max_tokens}
    if body.seed is not None:
        given["seed"] = body.seed + choice
    if body.echo and body.max_tokens == 0:
        given["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return body.params(**given)
