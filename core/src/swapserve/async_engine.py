"""The engine on a thread of its own, for callers on an event loop.

The engine is not thread-safe: submissions and aborts reach its thread through a queue, and results come back in
one call to the event loop a step. Text is made in the engine's thread, right after the step, so that a stop
string ends its request before another step is spent on it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

from swapserve.detokenizer import Chunk, TextStream
from swapserve.engine import Engine
from swapserve.params import SamplingParams
from swapserve.request import FinishReason, Output, Request
from swapserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

MAX_UNREAD_CHUNKS = 1024
"""A client that is this many chunks behind is not reading: its request is ended."""


class EngineDraining(RuntimeError):
    """The server is shutting down and takes nothing new."""


@dataclass(eq=False)
class Stream:
    """One request's chunks, to be read once, on the event loop that asked for them."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    loop: asyncio.AbstractEventLoop
    text: TextStream
    request: Request | None = None
    """Set once the engine has taken it."""
    closed: bool = False
    chunks: deque[Chunk] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a chunk comes; the streams of one client share it."""


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Chunk]]:
    """(index, chunk) of several streams as they come, until each has ended; they must share one `arrived`."""
    ended = [False] * len(streams)
    while True:
        for index, stream in enumerate(streams):
            while stream.chunks:
                chunk = stream.chunks.popleft()
                ended[index] = chunk.finish_reason is not None
                yield index, chunk
        if all(ended):
            return
        if not any(stream.chunks for stream in streams):
            streams[0].arrived.clear()
            await streams[0].arrived.wait()


@final
class AsyncEngine:
    """Runs an engine in a thread; `submit` gives a stream of chunks, `abort` ends one.

    Gauges (`num_running`, `num_waiting`, `kv_usage`) may be read at any time from any thread.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.draining = False
        self.num_slow_readers = 0
        """Requests ended because their client did not read."""
        self.num_finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        """The engine thread's own: streams whose request has not ended."""
        self._ids = itertools.count()
        self.death: str | None = None
        """Why the engine's thread can do nothing any more."""
        self._open = 0
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="swapserve-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread after the step it is in; requests that still run are dropped."""
        self._commands.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._thread.is_alive() and self.death is None

    @property
    def num_open(self) -> int:
        """Requests taken and not answered to the end yet, also those that the engine has not seen."""
        return self._open

    @property
    def num_running(self) -> int:
        return len(self.engine.running)

    @property
    def num_waiting(self) -> int:
        return len(self.engine.waiting)

    @property
    def kv_usage(self) -> float:
        return self.engine.kv.usage()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrived: asyncio.Event | None = None,
    ) -> Stream:
        """Take a request and return the stream of its chunks; the last one has a finish reason.

        Raises `RequestRefused` at once for what can never run, and `EngineDraining` while shutting down.
        """
        if self.draining or not self.alive:
            raise EngineDraining(self.death or "the server is shutting down and takes no new requests")
        self.engine.validate(prompt, params, cache_salt)
        stream = Stream(
            id=f"{next(self._ids):x}",
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            loop=asyncio.get_running_loop(),
            text=TextStream(self.tokenizer, prompt, params),
            arrived=arrived or asyncio.Event(),
        )
        self._open += 1
        self._idle.clear()
        self._commands.put(lambda: self._submit(stream))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose client has left; harmless for one that has ended."""
        if not stream.closed:
            self._commands.put(lambda: self._abort(stream))

    async def run_in_engine(self, function: Callable[[], Answer]) -> Answer:
        """Call a function between two steps, in the engine's thread, and await its answer."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def call() -> None:
            try:
                answer = function()
            except Exception as error:
                raised = error
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_exception(raised))
            else:
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(answer))

        self._commands.put(call)
        return await future

    async def drain(self) -> None:
        """Refuse what is new and wait until everything that was taken has been delivered."""
        self.draining = True
        if self._open:
            await self._idle.wait()

    def _run(self) -> None:
        """The engine's thread. When it dies, everyone who waits for it is told."""
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine died")
            self.death = f"the engine died: {type(error).__name__}: {error}"
            last = Chunk("", finish_reason=FinishReason.ERROR, error=self.death)
            self._deliver([(stream, last) for stream in list(self._streams.values())])
            while (command := self._commands.get()) is not None:
                try:
                    command()
                except Exception:
                    # An engine that died may fail at anything; those who still ask must be answered.
                    logger.debug("a command to the dead engine failed", exc_info=True)

    def _loop(self) -> None:
        """Commands, then a step, as long as there is either."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                return
            command()

    def _submit(self, stream: Stream) -> None:
        if stream.closed:
            return
        try:
            if self.death is not None:
                raise RuntimeError(self.death)
            stream.request = self.engine.submit(
                stream.prompt,
                stream.params,
                request_id=stream.id,
                priority=stream.priority,
                cache_salt=stream.cache_salt,
            )
            self._streams[stream.id] = stream
        except Exception as error:
            self._deliver([(stream, Chunk("", finish_reason=FinishReason.ERROR, error=str(error)))])

    def _abort(self, stream: Stream) -> None:
        output = self.engine.abort(stream.id)
        if output is not None:
            self._deliver(self._chunks([output]))

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            logger.exception("a step failed; the requests it held are ended")
            outputs = self.engine.recover(error)
        self._deliver(self._chunks(outputs))

    def _chunks(self, outputs: Sequence[Output]) -> list[tuple[Stream, Chunk]]:
        """Outputs as text; a stop string ends its request here."""
        made = []
        for output in outputs:
            stream = self._streams.get(output.request.id)
            if stream is None:
                continue
            chunk = stream.text.take(output)
            if chunk.finish_reason is not None and output.finish_reason is None:
                self.engine.abort(output.request.id, chunk.finish_reason)
            made.append((stream, chunk))
        return made

    def _deliver(self, made: Sequence[tuple[Stream, Chunk]]) -> None:
        """Hand chunks to the event loop, all of a step in one call; a client that does not read is let go."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Chunk]]] = {}
        for stream, chunk in made:
            by_loop.setdefault(stream.loop, []).append((stream, chunk))
            if chunk.finish_reason is not None:
                self._streams.pop(stream.id, None)
                self.num_finished[chunk.finish_reason.value] += 1
            elif len(stream.chunks) >= MAX_UNREAD_CHUNKS:
                self.num_slow_readers += 1
                self._commands.put(lambda stream=stream: self._abort(stream))  # type: ignore[misc]
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._arrive, batch)
            except RuntimeError:
                logger.debug("the event loop is gone; %d chunks are dropped", len(batch))

    def _arrive(self, batch: Sequence[tuple[Stream, Chunk]]) -> None:
        """On the event loop."""
        for stream, chunk in batch:
            if chunk.finish_reason is not None and not stream.closed:
                stream.closed = True
                self._open -= 1
                if self._open == 0:
                    self._idle.set()
            stream.chunks.append(chunk)
            stream.arrived.set()
