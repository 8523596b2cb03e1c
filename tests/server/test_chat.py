"""`/v1/chat/completions`, with the official client and without."""

from __future__ import annotations

from collections.abc import Iterator

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
