"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from swapserve.async_engine import Stream
from swapserve.detokenizer import Chunk
from swapserve.params import SamplingParams
from swapserve.request import TokenLogprobs
from swapserve.server import answers
from swapserve.server.protocol import ChatPrompt, ChatRequest, Message
from swapserve.server.state import LONG_TEXT, ServerState, aside, read_body, state_of
from swapserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Call:
    """One call and its `n` choices."""

    body: ChatRequest
    state: ServerState
    model: str
    streams: Sequence[Stream]
    given: list[int]
    """Tokens of each choice that were handed on."""

    def usage(self) -> dict[str, Any]:
        return answers.usage(self.streams, 1, sum(self.given))

    def logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": [_logprob(self.state.tokenizer, entry) for entry in chunk.logprobs or ()], "refusal": None}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, `n` times, at once or as a stream."""
    state = state_of(request)
    body = await read_body(request, ChatRequest, state.max_body_bytes)
    model = state.check_model(body.model)
    prompt = await rendered(state, body, body.messages)
    jobs = [(prompt, _params(body, n)) for n in range(body.n)]
    call = Call(body, state, model, await state.submit_all(jobs, body), [0] * body.n)
    if body.stream:
        return answers.sse(request, state, call.streams, _events(call))
    choices = []
    for index, chunks in enumerate(await answers.gather(request, state, call.streams)):
        whole = answers.joined(chunks)
        call.given[index] = len(whole.tokens)
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": call.logprobs(whole),
                "finish_reason": whole.finish_reason and whole.finish_reason.value,
            }
        )
    made = {**answers.envelope("chatcmpl", "chat.completion", model), "choices": choices, "usage": call.usage()}
    if body.prompt_logprobs is not None and (first := call.streams[0].request) is not None:
        made["prompt_logprobs"] = answers.vllm_prompt_logprobs(state.tokenizer, first.prompt_logprobs)
    return JSONResponse(made)


async def rendered(state: ServerState, asked: ChatPrompt, messages: Sequence[Message]) -> list[int]:
    """The prompt of a conversation, as token ids."""

    def render() -> list[int]:
        text = state.tokenizer.render_chat(
            [message.plain() for message in messages],
            chat_template=asked.chat_template,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            template_kwargs=asked.chat_template_kwargs,
        )
        return state.tokenizer.encode_chat(text)

    # A template of the client's own may take its time, whatever the length of the messages.
    return await aside(LONG_TEXT if asked.chat_template else sum(message.length for message in messages), render)


async def _events(call: Call) -> AsyncIterator[bytes]:
    head = answers.envelope("chatcmpl", "chat.completion.chunk", call.model)
    options = call.body.stream_options
    running_usage = options is not None and options.continuous_usage_stats

    def piece(index: int, delta: dict[str, Any], chunk: Chunk | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if chunk is not None:
            choice["logprobs"] = call.logprobs(chunk)
            choice["finish_reason"] = chunk.finish_reason and chunk.finish_reason.value
        return answers.event({**head, "choices": [choice], **({"usage": call.usage()} if running_usage else {})})

    begun = [False] * len(call.streams)
    async for index, chunk in answers.readable(call.streams):
        call.given[index] += len(chunk.tokens)
        if not begun[index]:
            begun[index] = True
            yield piece(index, {"role": "assistant", "content": ""})
        yield piece(index, {"content": chunk.text} if chunk.text else {}, chunk)
    if options is not None and options.include_usage:
        yield answers.event({**head, "choices": [], "usage": call.usage()})


def _params(body: ChatRequest, choice: int) -> SamplingParams:
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    given: dict[str, Any] = {"max_tokens": most, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if body.seed is not None:
        given["seed"] = body.seed + choice
    return body.params(**given)


def _logprob(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = tokenizer.token_text(token), tokenizer.token_bytes(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode() if data is None else data)}

    return {**one(entry.token, entry.logprob), "top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
