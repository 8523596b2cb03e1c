"""What handlers share: the server, reading a body, checking a model's name, noticing a client that left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request

from swapserve.async_engine import AsyncEngine, Stream
from swapserve.params import SamplingParams
from swapserve.server.errors import ApiError
from swapserve.tokenizer import Tokenizer

LONG_TEXT = 4096
"""Characters from which on a text is tokenized off the event loop."""
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class ServerState:
    """One server: the engine, the tokenizer, and what it is called."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_names: Sequence[str]
    """The names it answers to; the first stands in answers to requests that name none."""
    api_keys: Sequence[str] = ()
    """Any of these opens the API; none: open to all."""
    max_body_bytes: int = 32 * 2**20
    info: Mapping[str, str] = field(default_factory=dict)
    """What was chosen at start, for `/server_info`."""

    def check_model(self, name: str | None) -> str:
        """The name to answer under; 404 for one that is not served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404, f"the model {name!r} is not served here; there is: {', '.join(self.model_names)}", "model",
                "model_not_found",
            )  # fmt: skip
        return name

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    def submit_all(self, jobs: Sequence[tuple[Sequence[int], SamplingParams]], body: Any) -> list[Stream]:
        """Submit the requests of one call; when one is refused none of them runs."""
        arrived, streams = asyncio.Event(), list[Stream]()
        try:
            for prompt, params in jobs:
                streams.append(
                    self.engine.submit(
                        prompt, params, priority=body.priority, cache_salt=body.cache_salt, arrived=arrived
                    )
                )
        except Exception:
            self.abort(streams)
            raise
        return streams

    def abort(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self.engine.abort(stream)


def state_of(request: Request) -> ServerState:
    """The server a request came to."""
    return cast(ServerState, request.app.state.server)


async def read_body(request: Request, kind: type[Body], limit: int) -> Body:
    """The body as a model of what may be sent; 400 for what is no JSON, 413 for what is too large."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes")
        pieces.append(piece)
    try:
        data = json.loads(b"".join(pieces), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}")
    return kind.model_validate(data)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


@asynccontextmanager
async def aborting_when_gone(request: Request, state: ServerState, streams: Sequence[Stream]) -> AsyncIterator[None]:
    """End the streams when the client goes away, or when the block is left before they have ended."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        state.abort(streams)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        state.abort(streams)
