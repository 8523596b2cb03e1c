"""Whatever a client sends: a status code, one sentence, and nothing lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Running, serving

from swapserve.server.app import create_app


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(num_slots=128, max_model_len=200) as made:
        yield made


SIZE = 258
COMPLETION: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 200, ""),  # with a BOS there is one token: H52
    ({"prompt": []}, 400, "empty"),
    ({"prompt": ["hi", ""], "add_special_tokens": False}, 400, "prompt 1 of the list is empty"),
    ({"prompt": "", "add_special_tokens": False}, 400, "the prompt is empty"),
    ({}, 400, "prompt"),
    ({"prompt": "x" * 200}, 400, "201 tokens and the model's context is 200"),
    ({"prompt": "x" * 10, "max_tokens": 195}, 400, "11 tokens and max_tokens is 195"),
    ({"prompt": "x" * 10, "max_tokens": 150}, 400, "--kv-cache-memory-bytes"),
    ({"prompt": [SIZE]}, 400, "prompt: token id 258"),
    ({"prompt": [[-1]]}, 400, "prompt: token id -1"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [10**20]}, 400, "prompt"),
    ({"prompt": {"text": "x"}}, 400, "prompt"),
    ({"prompt": "x", "logit_bias": {str(SIZE): 5}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"--5": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"\u0665": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": True}}, 400, "logit_bias"),
    ({"prompt": ["x", 5]}, 400, "prompt: give a text, a list of texts, a list of token ids"),
    ({"prompt": "x", "temperature": True}, 400, "temperature"),
    ({"prompt": "x", "temperature": "0.5"}, 400, "temperature"),
    ({"prompt": "x", "echo": "yes"}, 400, "echo"),
    ({"prompt": "x", "store": True}, 400, "store"),
    ({"prompt": "x", "service_tier": "flex"}, 400, "service_tier"),
    ({"prompt": "x", "unheard_of": None}, 400, "unheard_of"),
    ({"prompt": "x", "stop_token_ids": [SIZE]}, 400, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"prompt": "x", "temperature": -0.1}, 400, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "n": 0}, 400, "n:"),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "stop": [""]}, 400, "stop"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ({"prompt": "x", "best_of": 3}, 400, "best_of"),
    ({"prompt": "x", "logprobs": 99}, 400, "logprobs"),
    ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
    ({"prompt": "x", "stream": False, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "x", "guided_json": {}}, 400, "guided_json"),
    ({"prompt": "x", "temprature": 0}, 400, "temprature"),
    ({"prompt": "x", "model": "nobody"}, 404, "chance, alias"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "says"), COMPLETION, ids=lambda value: str(value)[:40])
def test_completions(running: Running, body: dict[str, Any], status: int, says: str, stream: bool) -> None:
    """H47, H52 and more: refused before anything runs, streamed or not; the server answers the next request."""
    response = running.post("/v1/completions", **({"max_tokens": 2, "stream": stream} | body))
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert says in error["message"] and set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"] and "Traceback" not in error["message"]
    assert running.complete("still here", max_tokens=1)["choices"]


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url' is not"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content: give a text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"audio": {}}, "audio"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]


@pytest.mark.parametrize(("body", "says"), CHAT, ids=lambda value: str(value)[:40])
def test_chat(running: Running, body: dict[str, Any], says: str) -> None:
    response = running.post("/v1/chat/completions", **({"messages": [{"role": "user", "content": "x"}]} | body))
    assert response.status_code == 400 and says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b'{"prompt": "x", "temperature": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 9000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_bodies_that_are_no_request(running: Running, content: bytes) -> None:
    response = running.client.post("/v1/completions", content=content)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


NULLS = ("n", "stream", "stop", "seed", "temperature", "logit_bias", "priority", "user", "stream_options")
HARMLESS = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}


def test_what_says_nothing_is_accepted(running: Running) -> None:
    """Null is the same as left out, and standard fields may say that nothing special is wanted."""
    plain = running.complete("hello", max_tokens=5)["choices"]
    nulls = dict.fromkeys((*NULLS, "echo", "logprobs", "suffix", "best_of", "add_special_tokens"))
    assert running.complete("hello", max_tokens=5, **{**nulls, "temperature": 0})["choices"] == plain
    assert running.complete("hello", max_tokens=5, suffix="", **HARMLESS)["choices"] == plain
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    unused = {"tools": [], "tool_choice": "auto", "modalities": ["text"], "response_format": {"type": "text"}}
    absent = ("functions", "function_call", "audio", "reasoning_effort", "logprobs", "chat_template", *NULLS)
    for more in (unused, dict.fromkeys(absent), HARMLESS):
        response = running.post("/v1/chat/completions", **chat, **more)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("field", ["prompt", "cache_salt", "model", "stop", "\ud800"])
def test_half_a_surrogate_pair_is_no_text(running: Running, field: str) -> None:
    """What no tokenizer and no hash takes is refused, wherever it stands, and harms no one beside it."""
    running.gate.close()
    running.gate.allow(3)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(running.complete, "beside it, in the batch", max_tokens=20, ignore_eos=True)
        content = json.dumps({"prompt": "some words", field: "\ud800 x", "max_tokens": 3})
        assert "\\ud800" in content
        response = running.client.post("/v1/completions", content=content)
        running.gate.release()
        assert response.status_code == 400 and "\\ud800" in response.json()["error"]["message"]
        assert beside.result()["usage"]["completion_tokens"] == 20
    whole = json.dumps({"prompt": "\U0001f308 \\ud800", "max_tokens": 3})
    assert running.client.post("/v1/completions", content=whole).status_code == 200


def test_a_handler_that_fails_is_an_answer_and_a_line_in_the_log(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """And the connection, which others of the client's requests use, is kept."""

    def broken(name: str | None) -> str:
        raise KeyError("planted")

    client = httpx.Client(base_url=running.url, headers={"X-Request-Id": "mine"})
    assert client.get("/v1/models/chance").status_code == 200
    object.__setattr__(running.state, "check_model", broken)
    try:
        with caplog.at_level("ERROR", "swapserve.server.app"):
            response = client.get("/v1/models/chance")
    finally:
        object.__delattr__(running.state, "check_model")
    assert response.status_code == 500 and response.json()["error"]["type"] == "internal_server_error"
    assert response.headers["X-Request-Id"] == "mine" and "planted" not in response.text
    assert any(record.exc_info and "/v1/models/chance" in record.getMessage() for record in caplog.records)
    streams = response.extensions["network_stream"].get_extra_info("socket").getsockname()
    after = client.get("/v1/models/chance")
    assert after.status_code == 200
    assert after.extensions["network_stream"].get_extra_info("socket").getsockname() == streams
    client.close()


def test_a_body_that_never_comes_whole_is_no_failure(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    app = create_app(running.state)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400 and not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_refused_list_runs_none_of_its_prompts(running: Running) -> None:
    steps = running.gate.num_steps
    assert running.post("/v1/completions", prompt=[[5, 6], [SIZE]], max_tokens=50).status_code == 400
    running.wait_idle()
    assert running.gate.num_steps <= steps + 1


def test_paths_and_methods(running: Running) -> None:
    assert running.client.get("/nowhere").status_code == 404
    assert running.client.get("/v1/completions").status_code == 405
    assert running.client.get("/nowhere").json()["error"]["message"] == "GET /nowhere: there is no such path here"
    wrong = running.client.get("/v1/completions")
    assert "POST" in wrong.json()["error"]["message"] and wrong.headers["Allow"] == "POST"
    assert running.client.get("/v1/models/nobody").status_code == 404
    assert running.post("/detokenize", tokens=[SIZE]).status_code == 400


def test_a_body_that_is_too_large() -> None:
    with serving(state={"max_body_bytes": 1000}) as running:
        assert running.post("/v1/completions", prompt="x" * 2000).status_code == 413


def test_api_keys() -> None:
    with serving(state={"api_keys": ["first", "second"]}) as running:
        for path in ("/health", "/ping", "/version"):
            assert running.client.get(path).status_code == 200
        assert running.client.get("/v1/models").status_code == 401
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("firs", 401)):
            response = running.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status


def test_h54_ids_of_clients(running: Running) -> None:
    """H54: one id on many requests is echoed and never a key; a long one is refused."""

    def ask(number: int) -> tuple[str, str | None]:
        response = running.client.post(
            "/v1/completions",
            json={"prompt": f"p{number % 5}", "temperature": 0, "max_tokens": 6},
            headers={"X-Request-Id": "the same"},
        )
        return response.json()["choices"][0]["text"], response.headers["X-Request-Id"]

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    for number, (text, echoed) in enumerate(answers):
        assert echoed == "the same" and text == running.complete(f"p{number % 5}", max_tokens=6)["choices"][0]["text"]
    long = running.client.get("/v1/models", headers={"X-Request-Id": "x" * 5000})
    assert long.status_code == 400
    given = {running.client.get("/version").headers["X-Request-Id"] for _ in range(3)}
    assert len(given) == 3 and all(given)


def test_information(running: Running) -> None:
    assert running.client.get("/version").json()["version"]
    assert running.client.get("/policies").json()["scheduler"]["name"] == "chunked"
    assert running.client.get("/server_info").json()["models"] == ["chance", "alias"]
    ids = running.post("/tokenize", prompt="héllo", return_token_strs=True).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"]) == 7
    assert running.post("/detokenize", tokens=ids["tokens"][1:]).json() == {"prompt": "héllo"}
    assert running.post("/reset_prefix_cache").status_code == 200
