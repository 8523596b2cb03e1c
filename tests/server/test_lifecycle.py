"""Clients that leave, read slowly or come in crowds; engines that fail."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import Running, serving

from swapserve import SamplingParams, async_engine
from swapserve.request import Request
from swapserve.server.protocol import CompletionRequest


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(num_slots=4096) as made:
        yield made


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for another thread to bring something about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


def send_and_close(running: Running, body: dict[str, Any], until: Callable[[], bool], read: bool = False) -> None:
    """Send a request by hand, wait for something, and close the connection without reading the answer."""
    port = int(running.url.rsplit(":", 1)[1])
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        if read:
            connection.recv(100)
        eventually(until)


@pytest.mark.parametrize("stream", [False, True])
def test_h55_a_client_that_leaves_takes_all_its_requests_with_it(stream: bool) -> None:
    """H55: three prompts × n = 2, left while the first chunk of six computes: all six are gone at once."""
    with serving(scheduler="chunked,chunk_size=32", kv="paged,block_size=4", num_slots=4096) as running:
        running.gate.close()
        body = {"prompt": ["a" * 190, "b" * 190, "c" * 190], "n": 2, "max_tokens": 40, "stream": stream}
        with running.held(commands=6):
            send_and_close(running, body, lambda: running.gate.entered.is_set())
        eventually(lambda: running.engine._commands.qsize() >= 6)
        running.gate.allow(1)
        running.wait_idle()
        assert running.gate.num_steps <= 2, "steps were computed for a client that had left"
        assert running.engine.num_finished["abort"] == 6
        running.gate.release()
        running.complete("next")


@pytest.mark.parametrize("stream", [False, True])
def test_h16_left_while_decoding(running: Running, stream: bool) -> None:
    running.gate.close()
    running.gate.allow(5)
    body = {"prompt": "hello", "max_tokens": 200, "stream": stream, "ignore_eos": True}
    send_and_close(running, body, lambda: running.gate.num_steps == 5)
    # The abort waits behind the step at the gate, or came before that step began.
    eventually(lambda: running.engine._commands.qsize() > 0 or running.engine.num_running == 0)
    running.gate.allow(1)
    running.wait_idle()
    assert running.gate.num_steps <= 7


def test_h57_gauges_fall_to_zero_without_traffic() -> None:
    """H57: 20 running, 10 waiting, all cancelled at once, nothing else comes."""
    with serving(max_num_seqs=20, num_slots=8192) as running:
        running.gate.close()
        running.gate.allow(2)
        body = {"prompt": [f"p{n}" for n in range(30)], "max_tokens": 100, "ignore_eos": True}
        with running.held(commands=30):
            send_and_close(running, body, lambda: running.engine.num_running == 20 and running.engine.num_waiting == 10)
        running.gate.release()
        running.wait_idle()
        load = running.client.get("/load").json()
        assert (load["num_requests_running"], load["num_requests_waiting"], load["kv_cache_usage_perc"]) == (0, 0, 0)


def test_h31_a_preempted_answer_comes_whole() -> None:
    """H31: six clients, a pool that forces preemptions: each stream equals the one of a run alone."""
    kv, lengths = "paged,block_size=4", [30 + 7 * n for n in range(6)]
    with serving(kv=kv, num_slots=4096) as ample:
        alone = [ample.complete(f"client {n}", max_tokens=lengths[n], ignore_eos=True) for n in range(6)]
    with serving(kv=kv, num_slots=120) as tight, ThreadPoolExecutor(6) as pool:
        tight.gate.close()

        def ask(n: int) -> list[Any]:
            return tight.events(
                "/v1/completions", prompt=f"client {n}", max_tokens=lengths[n], ignore_eos=True, temperature=0,
                stream_options={"include_usage": True},
            )  # fmt: skip

        asked = [pool.submit(ask, n) for n in range(6)]
        eventually(lambda: tight.engine.num_waiting + tight.engine.num_running + tight.engine._commands.qsize() >= 6)
        tight.gate.release()
        for n, events in enumerate(future.result() for future in asked):
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            assert text == alone[n]["choices"][0]["text"]
            usage = events[-1]["usage"]
            assert usage["completion_tokens"] == lengths[n] and usage["prompt_tokens"] == 9
        assert tight.engine.engine.num_preemptions >= 4
        tight.wait_idle()


def test_h34_nothing_is_kept_of_requests_that_ended(running: Running) -> None:
    """H34: 120 calls with n = 4, half of them left: no request object survives."""

    def live() -> int:
        gc.collect()
        return sum(type(one) in (Request, async_engine.Stream) for one in gc.get_objects())

    running.complete("warm", n=4)
    running.wait_idle()
    running.engine.engine.last_plan = None
    before = live()
    for number in range(60):
        running.complete(f"kept {number}", n=4, max_tokens=3)
        seen = running.gate.num_steps
        body = {"prompt": f"left {number}", "n": 4, "max_tokens": 200, "stream": True, "ignore_eos": True}
        send_and_close(running, body, lambda seen=seen: running.gate.num_steps > seen)  # type: ignore[misc]
    running.wait_idle()
    running.engine.engine.last_plan = None
    eventually(lambda: live() <= before)
    assert not running.engine._streams


def test_h56_a_reader_that_stalls_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """H56: it is ended at a stated bound and counted; those who read feel nothing."""
    monkeypatch.setattr(async_engine, "MAX_UNREAD_CHUNKS", 200)
    with serving(num_slots=2**16, max_model_len=8000) as running:
        port = int(running.url.rsplit(":", 1)[1])
        running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        content = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True, "logprobs": 5})
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()
        )
        others = [running.complete(f"reader {n}", max_tokens=50, ignore_eos=True) for n in range(5)]
        assert all(answer["usage"]["completion_tokens"] == 50 for answer in others)
        eventually(lambda: running.engine.num_slow_readers > 0, 60)
        running.wait_idle()
        assert running.client.get("/load").json()["num_slow_readers"] == 1
        stalled.close()


def test_h58_health_answers_under_a_flood(running: Running) -> None:
    """H58: while a step is stuck and a thousand requests wait, health and load are answered."""
    running.gate.close()
    body = {"prompt": ["flood"] * 1000, "max_tokens": 5}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.post, "/v1/completions", **body)
        eventually(lambda: running.gate.entered.is_set())
        for _ in range(20):
            assert running.client.get("/health").status_code == 200
            assert running.client.get("/load").status_code == 200
        running.gate.release()
        assert len(asked.result().json()["choices"]) == 1000


def test_h58_a_call_of_many_requests_lets_others_in(running: Running) -> None:
    """H58: the event loop gets its turns while one call submits a thousand requests."""

    async def submit() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        jobs = [([5, 6], SamplingParams(max_tokens=1))] * 1000
        streams = await running.state.submit_all(jobs, CompletionRequest(prompt="x"))
        other.cancel()
        async for _ in async_engine.merged(streams):
            pass
        return turns

    assert asyncio.run(submit()) >= 10


def test_a_failed_step_is_an_error_for_those_in_it_and_no_one_else(running: Running) -> None:
    execute = running.gate.inner.execute

    def failing(batch: Any) -> Any:
        if any(work.slice.request.params.max_tokens == 13 for work in batch.works):
            raise RuntimeError("planted")
        return execute(batch)

    running.gate.inner.execute = failing  # type: ignore[method-assign]
    response = running.post("/v1/completions", prompt="x", max_tokens=13)
    assert response.status_code == 500 and "planted" in response.json()["error"]["message"]
    events = running.events("/v1/completions", prompt="x", max_tokens=13)
    assert events[-1]["error"]["type"] == "internal_server_error"
    running.complete("others live")
    assert running.client.get("/health").status_code == 200
    running.wait_idle()


def test_a_dead_engine_says_so(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    def dying(error: Exception) -> Any:
        raise SystemError("beyond repair")

    running.gate.inner.execute = lambda batch: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    running.engine.engine.recover = dying  # type: ignore[method-assign]
    response = running.post("/v1/completions", prompt="x")
    assert response.status_code == 500 and "beyond repair" in response.json()["error"]["message"]
    assert running.client.get("/health").status_code == 503
    assert running.post("/v1/completions", prompt="x").status_code == 503


def test_threads_end_with_the_server() -> None:
    before = threading.active_count()
    with serving() as running:
        running.complete("hello")
    eventually(lambda: threading.active_count() <= before + 1)
