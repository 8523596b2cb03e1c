"""What handlers share: the server, reading a body, checking a model's name, noticing a client that left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
JOBS_AT_ONCE = 64
"""After this many requests of one call, others get a turn on the event loop."""
Answer = TypeVar("Answer")
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
        return await aside(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def submit_all(self, jobs: Sequence[tuple[Sequence[int], SamplingParams]], body: Any) -> list[Stream]:
        """Submit the requests of one call; when one is refused none of them runs."""
        arrived, streams = asyncio.Event(), list[Stream]()
        try:
            for number, (prompt, params) in enumerate(jobs, 1):
                if number % JOBS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                streams.append(
                    self.engine.submit(
                        prompt, params, priority=body.priority, cache_salt=body.cache_salt, arrived=arrived
                    )
                )
        except BaseException:
            self.abort(streams)
            raise
        return streams

    def abort(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            self.engine.abort(stream)


def state_of(request: Request) -> ServerState:
    """The server a request came to."""
    return cast(ServerState, request.app.state.server)


async def aside(num_characters: int, function: Callable[[], Answer]) -> Answer:
    """Call a function, in a thread of its own when it has a long text to work on: others do not wait for it."""
    return function() if num_characters < LONG_TEXT else await asyncio.to_thread(function)


async def read_body(request: Request, kind: type[Body], limit: int) -> Body:
    """The body as a model of what may be sent; 400 for what is no JSON, 413 for what is too large."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes")
        pieces.append(piece)
    content = b"".join(pieces)
    try:
        data = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    _refuse_half_characters(content, data)
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}")
    return kind.model_validate(data)


def _refuse_half_characters(content: bytes, data: Any) -> None:
    """JSON can write one half of a surrogate pair, which is no text: neither a tokenizer nor a hash takes it."""
    if b"\\ud" not in content and b"\\uD" not in content:
        return
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ApiError(400, f"the body holds {half}, half of a surrogate pair, which is no character") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


@contextmanager
def aborting_when_gone(request: Request, state: ServerState, streams: Sequence[Stream]) -> Iterator[None]:
    """End the streams when the client goes away, or when the block is left before they have ended.

    Not an asynchronous one: a loop that closes ends those in any order, also before the block that is in them.
    """

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
