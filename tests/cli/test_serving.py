"""`serve MODEL` from the first line it prints to its exit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import clean_environment

MEMORY = ["--kv-cache-memory-bytes", "256KiB"]


class Server:
    """A server in a process of its own, from ready to gone."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.curl = ""
        self.headers = {"Content-Type": "application/json"}
        ready = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                self.log.append(line)
                if "curl http" in line:
                    self.curl = line[line.index("curl http") :].strip()
                    ready.set()
            ready.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        assert ready.wait(300), self.log
        assert self.curl, "".join(self.log)
        self.url = re.search(r"http://[^/]+", self.curl)[0]

    def get(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.load(answer)

    def stop(self, signal_number: int) -> int:
        self.process.send_signal(signal_number)
        code = self.process.wait(240)
        self._reader.join()
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers; those that still run at the end of the test are killed."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str, **environment: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-m", "swapserve.cli", *words, "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**environment),
        )
        running.append(process)
        return Server(process)

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_says_what_was_chosen_answers_the_line_it_prints_and_leaves_with_zero(
    start: Callable[..., Server], tiny_model: Path
) -> None:
    server = start(str(tiny_model), *MEMORY, "--scheduler", "chunked,chunk_size=32", "--block-size", "8")
    log = "".join(server.log)
    for fact in ("chunked (chunk_size=32", "prefix (block_size=8)", "none", "float32 on cpu", "blocks of 8", "tokens",
                 "requests of the greatest length", "at most 128 requests and 512 tokens"):  # fmt: skip
        assert fact in log, fact
    done = subprocess.run(server.curl, shell=True, capture_output=True, text=True, timeout=240)
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["model"] == str(tiny_model)
    assert server.stop(signal.SIGINT) == 0
    assert "Traceback" not in "".join(server.log)


def test_served_names_api_key_and_chat_template_reach_the_server(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    names = ["--served-model-name", "first", "--served-model-name", "second"]
    server = start(str(tiny_model), *MEMORY, *names, "--chat-template", str(template), SWAPSERVE_API_KEY="secret")
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.get("/v1/models")
    assert refused.value.code == 401
    refused.value.close()
    server.headers["Authorization"] = "Bearer secret"
    assert [model["id"] for model in server.get("/v1/models")["data"]] == ["first", "second"]
    body = {"model": "second", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
    assert server.get("/v1/chat/completions", body)["usage"]["prompt_tokens"] == 3
    assert "secret" not in "".join(server.log)
    assert server.stop(signal.SIGTERM) == 0


def test_it_starts_without_a_plugin_that_is_broken(
    start: Callable[..., Server], tiny_model: Path, install: Callable[..., Path]
) -> None:
    site = install("acme-broken", "scheduler_broken", "import not_a_module_anywhere\n")
    install("acme-broken-watcher", "broken_watcher", "import not_a_module_anywhere\n")
    server = start(str(tiny_model), *MEMORY, PYTHONPATH=str(site))
    assert server.get("/v1/models")["data"]
    assert any("acme-broken-watcher" in line for line in server.log)
    assert server.stop(signal.SIGINT) == 0


def test_an_outside_watcher_sees_the_requests(
    start: Callable[..., Server], tiny_model: Path, install: Callable[..., Path], tmp_path: Path
) -> None:
    seen = tmp_path / "seen.txt"
    source = f"""
from swapserve import hookimpl


@hookimpl
def swapserve_request_finished(request):
    with open({str(seen)!r}, "a") as file:
        print(request.finish_reason, len(request.output), file=file)
"""
    site = install("acme-recorder", "recorder", source)
    server = start(str(tiny_model), *MEMORY, PYTHONPATH=str(site))
    server.get("/v1/completions", {"model": str(tiny_model), "prompt": "abc", "max_tokens": 2, "ignore_eos": True})
    assert seen.read_text() == "length 2\n"
    assert server.stop(signal.SIGINT) == 0


README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def readme_block(language: str, holds: str) -> str:
    """The code block of the README that holds some text."""
    [block] = [text for text in re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S) if holds in text]
    return block


def test_the_lines_of_the_readme_work(start: Callable[..., Server], tiny_model: Path, capsys) -> None:
    server = start(str(tiny_model), *MEMORY, "--served-model-name", "gemma-3-270m")

    curl = readme_block("console", "curl").removeprefix("$ ").replace("http://127.0.0.1:8000", server.url)
    plain = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=240)
    assert json.loads(plain.stdout)["choices"][0]["text"]
    streamed = subprocess.run(
        curl.replace("curl", "curl -N", 1).replace('"temperature"', '"stream": true, "temperature"'),
        shell=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    events = [line for line in streamed.stdout.splitlines() if line]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"

    client = readme_block("python", "OpenAI(").replace("http://127.0.0.1:8000", server.url)
    exec(compile(client, "README.md", "exec"), {})
    offline = readme_block("python", "import LLM").replace("path/to/model", str(tiny_model))
    exec(compile(offline, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
