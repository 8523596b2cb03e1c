"""A server's first moment and its last: ports that are taken, and signals to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from swapserve.server.running import PortTaken, bind


def test_h59_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"127\.0\.0\.1 port {port}: .*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(PortTaken, match="--host"):
        bind("no.such.host.invalid", 8000)
    with pytest.raises(PortTaken, match="port 70000"):
        bind("127.0.0.1", 70000)


STREAMS = 10
SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from serving import *
from swapserve.server.running import run_server
hf = byte_tokenizer()
engine, gate = chance_engine(text_table(hf), "chunked", "prefix,block_size=4", "none", 8192, max_num_seqs=16)
gate.close()
state = ServerState(AsyncEngine(engine, Tokenizer(hf)), Tokenizer(hf), ["chance"])
sock = bind("127.0.0.1", 0)
def on_drain(message):
    print(message, flush=True)
def go():
    for line in sys.stdin:
        gate.allow(20) if line == "begin\\n" else gate.release()
threading.Thread(target=go, daemon=True).start()
run_server(state, sock, announce=on_drain, ready=lambda: print("ready", sock.getsockname()[1], flush=True))
print("idle", engine.kv.usage(), engine.has_work, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_h60_a_signal_lets_streams_finish(number: signal.Signals) -> None:
    """H60: ten streams at token 20 of 60: all arrive whole, newcomers and /health get 503 meanwhile, exit code 0."""
    folder = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    try:
        word, port = process.stdout.readline().split()
        assert word == "ready"
        asyncio.run(_drain(process, number, f"http://127.0.0.1:{port}"))
        assert process.stdout.readline().split() == ["idle", "0.0", "False"]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


STALLED = SERVER.replace("gate.close()", "").replace(
    "run_server(state, sock,",
    "sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)\nrun_server(state, sock, grace_seconds=0.2,",
)


def test_h60_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    """H60: everything is made, one client reads nothing of it: the server waits for a stated while and ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", STALLED, str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split()[1])
        content = json.dumps({"prompt": ["x"] * 16, "max_tokens": 200, "stream": True, "logprobs": 5})
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            stalled.sendall((head + content).encode())
            stalled.recv(1, socket.MSG_PEEK)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        _, said = process.communicate()
    assert "asynchronous generator" not in said


async def _drain(process: subprocess.Popen[str], number: signal.Signals, url: str) -> None:
    assert process.stdout is not None and process.stdin is not None
    begun = asyncio.Semaphore(0)

    async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:

        async def read(n: int) -> int:
            tokens, body = 0, {"prompt": f"s{n}", "max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": 0}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        tokens += len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"])
                        begun.release()
            return tokens

        readers = [asyncio.ensure_future(read(n)) for n in range(STREAMS)]
        while (await client.get("/load")).json()["server_load"] < STREAMS:
            await asyncio.sleep(0.01)
        process.stdin.write("begin\n")
        process.stdin.flush()
        # The first step began with whoever came first; the others are at most one token behind.
        for _ in range(STREAMS * 19):
            await begun.acquire()
        process.send_signal(number)
        await asyncio.to_thread(process.stdout.readline)
        assert (await client.get("/health")).status_code == 503
        late = await client.post("/v1/completions", json={"prompt": "late"})
        assert late.status_code == 503 and late.headers["Retry-After"]
        process.stdin.write("go\n")
        process.stdin.flush()
        assert await asyncio.gather(*readers) == [60] * STREAMS
