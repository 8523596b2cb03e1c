"""From an application to a server on a socket, and from a signal to a clean end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from swapserve.server.app import create_app
from swapserve.server.state import ServerState

BACKLOG = 2048
GRACE_SECONDS = 10.0


class PortTaken(ValueError):
    """The address cannot be listened on; the message names it and the flag."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on an address, made before anything slow begins; `PortTaken` when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listening from here on: a second server that asks for the port is told at once.
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise PortTaken(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host"
        ) from None
    sock.set_inheritable(True)
    return sock


class _Server(uvicorn.Server):
    """Ends in two steps: on the first signal it finishes what runs and refuses what is new, on the second it stops."""

    def __init__(self, config: uvicorn.Config, state: ServerState, announce: Callable[[str], None]) -> None:
        super().__init__(config)
        self.ours, self.announce = state, announce
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending is not None or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self.ours.engine.draining = True
        self._loop.call_soon_threadsafe(self._begin_ending)

    def _begin_ending(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        self.announce("finishing what runs; press Ctrl-C again to stop at once")
        await self.ours.engine.drain()
        self.should_exit = True


def run_server(
    state: ServerState,
    sock: socket.socket,
    *,
    announce: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Serve until a signal comes; returns when everything that was taken has been answered.

    Clients that have not read their answers `grace_seconds` after the last was made are cut off.

    `state.engine` is started and stopped here; `ready` is called once requests are answered.
    """
    config = uvicorn.Config(
        create_app(state), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=75,
    )  # fmt: skip
    # uvicorn declares whole seconds and hands the value to asyncio, which takes parts of them.
    config.timeout_graceful_shutdown = grace_seconds  # type: ignore[assignment]
    server = _Server(config, state, announce)

    async def main() -> None:
        serving = asyncio.ensure_future(server.serve([sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            ready()
        await serving

    state.engine.start()
    try:
        asyncio.run(main())
    finally:
        state.engine.stop()
