"""`/v1/chat/completions`, with the official client and without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serving import Running, byte_tokenizer, serving

QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_an_answer(running: Running) -> None:
    answer = running.post("/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=9).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 9 and choice["finish_reason"] == "length"
    prompt = running.post("/tokenize", messages=QUESTION).json()
    assert answer["usage"]["prompt_tokens"] == prompt["count"] and prompt["tokens"][0] == 0
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    again = running.post("/v1/chat/completions", messages=parts, temperature=0, max_completion_tokens=9).json()
    assert again["choices"] == answer["choices"]


def test_h23_a_stream_begins_with_the_role_and_ends_with_one_reason(running: Running) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 5, "n": 2}
    whole = running.post("/v1/chat/completions", **body).json()
    events = running.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for index in (0, 1):
        parts = [c for event in events for c in event["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(part["delta"].get("content", "") for part in parts)
        assert said == whole["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"] is not None] == ["length"]
        assert parts[-1]["finish_reason"] == "length"


def test_the_official_client_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="chance", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, seed=1, user="me"
    )
    assert plain.choices[0].message.content and plain.usage and plain.usage.completion_tokens == 8
    assert plain.choices[0].logprobs and len(plain.choices[0].logprobs.content or ()) == 8
    assert len((plain.choices[0].logprobs.content or ())[0].top_logprobs) == 3
    chunks = list(
        client.chat.completions.create(model="chance", messages=QUESTION, temperature=0, max_tokens=8, stream=True)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    completion = client.completions.create(model="alias", prompt="hi", max_tokens=3, extra_body={"top_k": 1})
    assert completion.choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["chance", "alias"]


def test_the_official_client_sees_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is: chance, alias"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="chance", messages=QUESTION, temperature=-1)


def test_bytes_of_a_token_that_is_half_a_character() -> None:
    with serving(says="→世.") as running:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
        body["chat_template"] = "{{ messages[0]['content'] }}→"
        choice = running.post("/v1/chat/completions", **body).json()["choices"][0]
        said = [entry["bytes"] for entry in choice["logprobs"]["content"]]
        assert choice["message"]["content"] == "世." and said == [[0xE4], [0xB8], [0x96], [ord(".")]]


def test_templates_get_their_variables_and_nothing_of_the_library(running: Running) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "chat_template": "{{ mood }} {{ messages[0]['content'] }}"}
    plain = running.post("/v1/chat/completions", **body).json()["usage"]["prompt_tokens"]
    merry = running.post("/v1/chat/completions", **body, chat_template_kwargs={"mood": "merry"}).json()
    assert merry["usage"]["prompt_tokens"] == plain + len("merry")
    asked = {"messages": QUESTION, "chat_template": body["chat_template"], "chat_template_kwargs": {"mood": "merry"}}
    assert running.post("/tokenize", **asked).json()["count"] == plain + len("merry")
    response = running.post("/v1/chat/completions", **body, chat_template_kwargs={"truncation": True, "max_length": 2})
    assert response.status_code == 400 and "'max_length'" in response.json()["error"]["message"]


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """As the official client dumps it, with all the fields that are null."""
    asked = client.chat.completions.create(model="chance", messages=QUESTION, max_tokens=3)
    said = asked.choices[0].message.model_dump()
    assert "tool_calls" in said
    again = client.chat.completions.create(model="chance", messages=[*QUESTION, said, *QUESTION], max_tokens=3)
    assert again.usage and asked.usage and again.usage.prompt_tokens > asked.usage.prompt_tokens


def test_h58_a_conversation_that_takes_long_to_render_holds_up_no_one(running: Running) -> None:
    """H58: health is answered while a long conversation becomes a prompt."""
    rendering, go = threading.Event(), threading.Event()
    render = running.tokenizer.render_chat

    def waiting(*args: Any, **kwargs: Any) -> str:
        rendering.set()
        assert go.wait(20)
        return render(*args, **kwargs)

    running.tokenizer.render_chat = waiting  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(1) as pool:
            long = [{"role": "user", "content": "x" * 5000}]
            asked = pool.submit(running.post, "/v1/chat/completions", messages=long)
            assert rendering.wait(20)
            answer = httpx.get(f"{running.url}/health", timeout=10)
            go.set()
            assert answer.status_code == 200 and asked.result().status_code == 400
    finally:
        go.set()
        del running.tokenizer.render_chat  # type: ignore[method-assign]


def test_a_conversation_goes_on_with_its_last_message(running: Running) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "well"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    assert running.post("/v1/chat/completions", **body).status_code == 200
    response = running.post("/v1/chat/completions", **{**body, "add_generation_prompt": True})
    assert response.status_code == 400 and "add_generation_prompt" in response.json()["error"]["message"]


def test_h44_a_base_model_answers_completions_only_until_it_gets_a_template() -> None:
    base = byte_tokenizer(chat_template=None)
    with serving(hf=base) as running:
        response = running.post("/v1/chat/completions", messages=QUESTION)
        assert response.status_code == 400 and "--chat-template" in response.json()["error"]["message"]
        running.complete("hello")
    with serving(hf=base, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}") as running:
        assert running.post("/v1/chat/completions", messages=QUESTION, max_tokens=2).status_code == 200
