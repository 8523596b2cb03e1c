"""What completions and chat answers have in common: usage, server-sent events, and log-probabilities as JSON."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from swapserve.async_engine import Stream, merged
from swapserve.detokenizer import Chunk
from swapserve.request import FinishReason, TokenLogprobs
from swapserve.server.errors import ApiError, as_api_error
from swapserve.server.state import ServerState, aborting_when_gone
from swapserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def envelope(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields every answer and every chunk of a stream begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event; strict JSON."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def usage(streams: Sequence[Stream], num_prompts: int, num_output: int) -> dict[str, Any]:
    """Tokens of a call: each prompt once, whatever the number of its choices, and every token given so far."""
    per_prompt = len(streams) // num_prompts
    firsts = streams[::per_prompt]
    prompt = sum(len(stream.prompt) for stream in firsts)
    cached = sum((stream.request.cached_tokens or 0) for stream in firsts if stream.request)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_output,
        "total_tokens": prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def raise_if_failed(chunk: Chunk) -> None:
    """An error of the engine is the whole call's error."""
    if chunk.finish_reason is FinishReason.ERROR:
        raise ApiError(500, chunk.error or "the request failed")


async def gather(request: Request, state: ServerState, streams: Sequence[Stream]) -> list[list[Chunk]]:
    """All chunks of each stream, for an answer that is not streamed."""
    chunks: list[list[Chunk]] = [[] for _ in streams]
    with aborting_when_gone(request, state, streams):
        async for index, chunk in merged(streams):
            raise_if_failed(chunk)
            chunks[index].append(chunk)
    return chunks


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Several chunks of one stream as one."""
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        logprobs=logprobs if any(chunk.logprobs is not None for chunk in chunks) else None,
        offsets=[offset for chunk in chunks for offset in chunk.offsets],
        finish_reason=chunks[-1].finish_reason,
    )


def sse(
    request: Request, state: ServerState, streams: Sequence[Stream], events: AsyncIterator[bytes]
) -> StreamingResponse:
    """A stream of events that ends its requests when the client leaves, and says so when one fails."""

    async def body() -> AsyncIterator[bytes]:
        with aborting_when_gone(request, state, streams):
            try:
                async for piece in events:
                    yield piece
            except Exception as error:
                yield event(as_api_error(error).body())
            yield DONE

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def readable(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Chunk]]:
    """Chunks that say something: what has no text yet joins the next chunk of its stream."""
    kept: list[list[Chunk]] = [[] for _ in streams]
    async for index, chunk in merged(streams):
        raise_if_failed(chunk)
        kept[index].append(chunk)
        if chunk.text or chunk.finish_reason is not None:
            whole = kept[index]
            kept[index] = []
            yield index, whole[0] if len(whole) == 1 else joined(whole)


def vllm_prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[Any]:
    """`prompt_logprobs` in vLLM's form: by token id, the prompt's own token and the most likely ones."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token)}
            for token, logprob, rank in _ranked(entry)
        }
        for entry in entries
    ]


def _ranked(entry: TokenLogprobs) -> list[tuple[int, float, int]]:
    ranked = [(entry.token, entry.logprob, entry.rank)]
    ranked += [(token, lp, rank) for rank, (token, lp) in enumerate(entry.top, 1) if token != entry.token]
    return ranked
