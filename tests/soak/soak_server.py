"""A soak of the real server: many clients, a third of which leave at a random moment.

    python tests/soak/soak_server.py

Starts `serve` on a tiny random model, sends 2,000 requests at 64 at a time, half of them streamed, and looks at the
server's memory all along. Afterwards no KV slot may be held, memory must be flat, every answer that was read to its
end must be whole, and the next request must answer. Exit code 1 when one of these does not hold.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.cli.tiny import save_tiny_model

FLAT_SLOPE = 5.0
"""MiB per 1,000 requests after the warm-up: less is flat. Allocators and kernels for new shapes fill up at first."""


class Soak:
    """What the clients saw."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random = url, random.Random(seed)
        self.finished = self.left = 0
        self.wrong: list[str] = []

    async def one(self, client: httpx.AsyncClient, number: int) -> None:
        """One request: read to its end, or left after a random while."""
        leave_after = self.random.uniform(0.0, 0.6) if self.random.random() < 1 / 3 else None
        body = {
            "prompt": "soak " * self.random.randint(1, 20) + str(number % 50),
            "max_tokens": self.random.randint(1, 60),
            "ignore_eos": True,
            "temperature": self.random.choice((0.0, 0.9)),
            "stream": self.random.random() < 0.5,
        }
        try:
            await asyncio.wait_for(self._ask(client, body), leave_after)
            self.finished += 1
        except TimeoutError:
            self.left += 1

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object]) -> None:
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body)
            count = response.json().get("usage", {}).get("completion_tokens")
            if response.status_code != 200 or count != body["max_tokens"]:
                self.wrong.append(f"{response.status_code}: {response.text[:200]}")
            return
        reasons, done = 0, 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line:
                    reasons += json.loads(line[6:])["choices"][0]["finish_reason"] == "length"
        if (reasons, done) != (1, 1):
            self.wrong.append(f"a stream with {reasons} finish reasons and {done} ends")


async def soak(url: str, pid: int, count: int, concurrency: int, seed: int) -> tuple[Soak, list[tuple[int, float]]]:
    """Send all requests; returns what was seen and the server's memory in MiB after every 50 requests."""
    made, memory, process = Soak(url, seed), list[tuple[int, float]](), psutil.Process(pid)
    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def worker() -> None:
            for number in numbers:
                await made.one(client, number)
                if number % 50 == 0:
                    memory.append((number, process.memory_info().rss / 2**20))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        end = time.monotonic() + 20
        while (load := (await client.get("/load")).json())["server_load"] and time.monotonic() < end:
            await asyncio.sleep(0.1)
        print(f"afterwards: {load}")
        if load["kv_cache_usage_perc"] or load["num_requests_running"] or load["num_requests_waiting"]:
            made.wrong.append("slots or requests are held with nothing to do")
        answer = await client.post("/v1/completions", json={"prompt": "next", "max_tokens": 3, "ignore_eos": True})
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 3:
            made.wrong.append(f"the next request: {answer.text[:200]}")
    return made, memory


@click.command(help=__doc__)
@click.option("--requests", default=2000, help="Requests that count.")
@click.option("--warm-up", default=6000, help="Requests before those, whose memory does not count.")
@click.option("--concurrency", default=64)
@click.option("--seed", default=0)
@click.argument("options", nargs=-1)
def main(requests: int, warm_up: int, concurrency: int, seed: int, options: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        # A pool that all requests together do not fit into, and that is soon used to its last page.
        command = [sys.executable, "-m", "swapserve.cli", folder, "--port", "0", "--kv-cache-memory-bytes", "2MB"]
        with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = ""
            for line in server.stderr:
                if "curl http" in line:
                    url = line.split()[1].removesuffix("/v1/completions")
                    break
            begin = time.monotonic()
            made, memory = asyncio.run(soak(url, server.pid, warm_up + requests, concurrency, seed))
            seconds = time.monotonic() - begin
            server.terminate()
            code = server.wait(30)
    half = [point for point in sorted(memory) if point[0] >= warm_up]
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope * 1000
    print(f"{made.finished} answered, {made.left} left, {seconds:.0f} s; exit code of the server {code}")
    print("MiB by request:", " ".join(f"{at}:{mib:.0f}" for at, mib in sorted(memory)[:: max(1, len(memory) // 16)]))
    print(f"memory: {memory[0][1]:.0f} MiB at first, {memory[-1][1]:.0f} at last, slope {slope:+.2f} MiB per 1,000")
    if slope > FLAT_SLOPE:
        made.wrong.append("memory grows")
    for problem in made.wrong[:10]:
        print("wrong:", problem)
    sys.exit(1 if made.wrong or code else 0)


if __name__ == "__main__":
    main()
