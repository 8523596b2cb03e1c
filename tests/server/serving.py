"""A real server on 127.0.0.1 in this process, on a model of chance, for tests of HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import uvicorn
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from swapserve import Batch, Engine, ModelInfo, Plugins, Request, Verdict
from swapserve.async_engine import AsyncEngine
from swapserve.policies import KVManager, Scheduler, Speculator
from swapserve.server.app import create_app
from swapserve.server.running import bind
from swapserve.server.state import ServerState
from swapserve.spec import PolicySpec, check_options
from swapserve.testing.chance import ChanceExecutor, chance_table
from swapserve.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer(*, bos: bool = True, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, `<s>` 0 and `</s>` 1; with `bos` it begins every text with `<s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{byte: index for index, byte in enumerate(alphabet, 2)}}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    if bos:
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    return made


class Gate:
    """Holds the executor back: each step needs a permit, unless the gate is open."""

    def __init__(self, inner: ChanceExecutor) -> None:
        self.inner, self.open = inner, True
        self._permits = threading.Semaphore(0)
        self.entered = threading.Event()
        self.num_steps = 0

    def close(self) -> None:
        self.open = False

    def allow(self, steps: int) -> None:
        self.entered.clear()
        for _ in range(steps):
            self._permits.release()

    def release(self) -> None:
        self.open = True
        self._permits.release()

    def execute(self, batch: Batch) -> list[Verdict]:
        self.entered.set()
        if not self.open:
            self._permits.acquire()
        self.num_steps += 1
        return self.inner.execute(batch)

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


@dataclass
class Running:
    """A server that answers."""

    url: str
    state: ServerState
    engine: AsyncEngine
    gate: Gate
    client: httpx.Client
    tokenizer: Tokenizer
    server: uvicorn.Server
    sock: socket.socket

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
        """A greedy completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, parsed; the last must be [DONE]."""
        import json

        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
        return [json.loads(line.removeprefix("data: "), parse_constant=_refuse) for line in lines[:-1]]

    @contextmanager
    def held(self, commands: int) -> Iterator[None]:
        """Inside the block the engine's thread takes no command; it goes on once so many wait for it.

        So a step cannot begin with only some of the requests of one call.
        """
        there, go = threading.Event(), threading.Event()

        def wait() -> None:
            there.set()
            end = time.monotonic() + 20
            while not go.wait(0.005) or (self.engine._commands.qsize() < commands and time.monotonic() < end):
                time.sleep(0.001)

        self.engine._commands.put(wait)
        assert there.wait(20)
        go.set()
        yield

    def wait_idle(self) -> None:
        """Until nothing runs or waits; the slots must be back."""

        async def drained() -> None:
            while self.engine.num_running or self.engine.num_waiting:
                await self.engine.run_in_engine(lambda: None)

        asyncio.run(asyncio.wait_for(drained(), 20))
        assert self.engine.kv_usage == 0.0


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def chance_engine(
    table: torch.Tensor, scheduler: str, kv: str, speculator: str, num_slots: int, **info: Any
) -> tuple[Engine, Gate]:
    plugins, gate = Plugins(), Gate(ChanceExecutor(table))
    model = ModelInfo(
        name="chance",
        vocab_size=table.shape[0],
        **{
            "max_model_len": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "eos_token_ids": frozenset({1}),
            **info,
        },
    )
    made = {}
    for kind, text in (("scheduler", scheduler), ("kv", kv), ("speculator", speculator)):
        spec = PolicySpec.parse(text)
        policy = plugins.policy(kind, spec.name)
        made[kind] = (policy, check_options(kind, policy, spec))
    scheduler_class, kv_class, speculator_class = (made[kind][0] for kind in ("scheduler", "kv", "speculator"))
    assert issubclass(scheduler_class, Scheduler)
    assert issubclass(kv_class, KVManager) and issubclass(speculator_class, Speculator)
    engine = Engine(
        executor=gate,
        scheduler=scheduler_class(made["scheduler"][1]),
        kv=kv_class(made["kv"][1], num_slots),
        speculator=speculator_class(made["speculator"][1], model),
        model=model,
        seed=0,
    )
    return engine, gate


def text_table(tokenizer: PreTrainedTokenizerFast, says: str | bytes | None = None, seed: int = 3) -> torch.Tensor:
    """Logits by last token: random over printable characters, or ones that say a text after its first character."""
    size = len(tokenizer)
    table = chance_table(size, seed)
    table[:, :2] = -20.0
    for byte in range(size - 2):
        if not 32 <= tokenizer.backend_tokenizer.decode([byte + 2]).encode()[0] < 127:
            table[:, byte + 2] -= 30.0
    if says is not None:
        ids = tokenizer.encode(says, add_special_tokens=False) if isinstance(says, str) else byte_ids(tokenizer, says)
        for before, after in zip(ids[:-1], ids[1:], strict=True):
            table[before, :] = -10.0
            table[before, after] = 10.0
    return table


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token id a byte, also for bytes that are no text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    # GPT-2's byte-level alphabet: bytes without a printable letter take the letters from 256 on.
    letters |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    return [int(tokenizer.convert_tokens_to_ids(letters[byte])) for byte in data]


@contextmanager
def serving(
    *,
    scheduler: str = "chunked",
    kv: str = "prefix,block_size=4",
    speculator: str = "none",
    num_slots: int = 2048,
    says: str | bytes | None = None,
    table: torch.Tensor | None = None,
    hf: PreTrainedTokenizerFast | None = None,
    chat_template: str | None = None,
    state: dict[str, Any] | None = None,
    **info: Any,
) -> Iterator[Running]:
    """A server on a free port of 127.0.0.1, ended when the block is left."""
    hf = hf or byte_tokenizer()
    tokenizer = Tokenizer(hf, chat_template)
    engine, gate = chance_engine(
        text_table(hf, says) if table is None else table, scheduler, kv, speculator, num_slots, **info
    )
    async_engine = AsyncEngine(engine, tokenizer)
    server_state = ServerState(async_engine, tokenizer, ["chance", "alias"], **(state or {}))
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(server_state), log_level="error", access_log=False, lifespan="off")
    )
    started = threading.Event()
    startup = server.startup

    async def notify(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = notify  # type: ignore[method-assign]
    async_engine.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert started.wait(20)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=30) as client:
        try:
            yield Running(url, server_state, async_engine, gate, client, tokenizer, server, sock)
        finally:
            gate.release()
            server.should_exit = server.force_exit = True
            thread.join(20)
            async_engine.stop()
            sock.close()
