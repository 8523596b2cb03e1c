"""`/v1/completions`: plain and streamed, several prompts and choices, echo and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from serving import Running, serving

from swapserve.request import LOGPROB_FLOOR


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


def streamed_text(events: list[dict], index: int = 0) -> str:  # type: ignore[type-arg]
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_an_answer_has_all_it_should(running: Running) -> None:
    answer = running.complete("hello", max_tokens=8, model="alias")
    assert answer["object"] == "text_completion" and answer["model"] == "alias" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 8 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 14


def test_a_stream_says_the_same(running: Running) -> None:
    whole = running.complete("hello", max_tokens=12)["choices"][0]["text"]
    events = running.events("/v1/completions", prompt="hello", max_tokens=12, temperature=0)
    assert streamed_text(events) == whole
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None} and len({event["id"] for event in events}) == 1


def test_h23_usage_comes_last_and_only_when_asked(running: Running) -> None:
    plain = running.events("/v1/completions", prompt="x", max_tokens=3, n=2)
    assert all(event["choices"] and "usage" not in event for event in plain)
    asked = running.events("/v1/completions", prompt="x", max_tokens=3, n=2, stream_options={"include_usage": True})
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] == 6
    assert all(event["choices"] for event in asked[:-1])
    for events in (plain, asked):
        reasons = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
        assert sorted(reasons) == [(0, "length"), (1, "length")]


def test_prompts_as_texts_and_as_ids(running: Running) -> None:
    ids = running.tokenizer.encode("hello")
    one, two = running.complete("hello"), running.complete(ids)
    assert one["choices"][0]["text"] == two["choices"][0]["text"] and two["usage"]["prompt_tokens"] == 6
    several = running.complete(["hello", "world"], n=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] == several["choices"][1]["text"] == one["choices"][0]["text"]
    assert several["choices"][2]["text"] != one["choices"][0]["text"]
    assert several["usage"]["prompt_tokens"] == 12
    assert len(running.complete([ids, [5, 6]])["choices"]) == 2


def test_a_seed_makes_choices_that_differ_and_repeat(running: Running) -> None:
    answers = [running.complete("hello", temperature=1, seed=7, n=3, max_tokens=20) for _ in range(2)]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_h14_cached_tokens_are_those_not_computed(running: Running) -> None:
    prompt = "a prompt of its own that is new " * 2
    first, second = running.complete(prompt), running.complete(prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (len(prompt) + 1 - 1) // 4 * 4
    events = running.events("/v1/completions", prompt=prompt, stream_options={"include_usage": True})
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_usage_in_every_event_counts_what_was_sent_so_far(running: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        events = running.events(path, **prompt, max_tokens=4, n=2, temperature=0, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[0] <= 1 and set(counts) >= set(range(1, 9)), counts


def test_token_ids_are_returned_when_asked_for(running: Running) -> None:
    body = {"prompt": ["hello", "hi"], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    choices = running.complete(**body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [running.tokenizer.encode(p) for p in body["prompt"]]
    assert all(running.tokenizer.decode(choice["token_ids"]) == choice["text"] for choice in choices)
    parts = [c for event in running.events("/v1/completions", **body) for c in event["choices"] if c["index"] == 1]
    assert [token for part in parts for token in part["token_ids"]] == choices[1]["token_ids"]
    assert ["prompt_token_ids" in part for part in parts] == [True] + [False] * (len(parts) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_places_in_the_text(running: Running, stream: bool) -> None:
    """Of several prompts, each in its own text; a BOS that the text does not show has no length."""
    (end,) = running.tokenizer.encode("</s>", add_special_tokens=False)
    ids = [0, *running.tokenizer.encode("ab", False), end, *running.tokenizer.encode("c", False)]
    prompts = ["ab", "a longer prompt", "<s>written", ids]
    for prompt, other in zip(prompts, reversed(prompts), strict=True):
        if isinstance(prompt, str) and isinstance(other, str):
            both: list[object] = [prompt, other]
        else:
            both = [prompt]
        body = {"prompt": both if len(both) > 1 else prompt, "max_tokens": 3, "echo": True, "logprobs": 0}
        answers: list[tuple[str, list[int], list[str]]] = []
        if stream:
            parts = [c for event in running.events("/v1/completions", **body) for c in event["choices"]]
            for index in range(len(both)):
                mine = [part for part in parts if part["index"] == index]
                offsets = [one for part in mine for one in part["logprobs"]["text_offset"]]
                tokens = [one for part in mine for one in part["logprobs"]["tokens"]]
                answers.append(("".join(part["text"] for part in mine), offsets, tokens))
        else:
            for choice in running.post("/v1/completions", **body).json()["choices"]:
                answers.append((choice["text"], choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]))
        for text, offsets, tokens in answers:
            ends = [*offsets[1:], len(text)]
            shown = [text[begin:end] for begin, end in zip(offsets, ends, strict=True)]
            assert all(part in (token, "") for part, token in zip(shown, tokens, strict=True)), (shown, tokens)
            assert "".join(shown) == text


def exact_logprobs(running: Running, ids: list[int]) -> list[float | None]:
    """What the model of chance says of each token after the first."""
    log = torch.log_softmax(running.gate.inner.table, dim=1)
    return [None, *(float(log[before, after]) for before, after in zip(ids[:-1], ids[1:], strict=True))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["computed", "cached"])
def test_h11_echo_has_a_logprob_for_every_prompt_token(running: Running, stream: bool, again: bool) -> None:
    """H11: also when the prompt is in the prefix cache."""
    prompt = "some words that are echoed"
    if again:
        running.complete(prompt)
    body = {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 2, "temperature": 0}
    if stream:
        events = running.events("/v1/completions", **body)
        text, parts = streamed_text(events), [event["choices"][0]["logprobs"] for event in events]
        logprobs = {key: [one for part in parts for one in part[key]] for key in parts[0]}
    else:
        choice = running.complete(**body)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    ids = running.tokenizer.encode(prompt)
    assert text.startswith(prompt) and len(logprobs["tokens"]) == len(ids) + 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(exact_logprobs(running, ids)[1:], abs=1e-4)
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][-4:] == [len(prompt) + n for n in range(4)]


def test_h45_prompt_logprobs_in_pieces() -> None:
    """H45: a prompt of 40 tokens in chunks of 7: 40 entries, and no event before the first real output."""
    with serving(scheduler="chunked,chunk_size=7") as running:
        prompt = "x" * 19 + "y" * 20
        events = running.events("/v1/completions", prompt=prompt, max_tokens=2, echo=True, logprobs=1, temperature=0)
        logprobs = events[0]["choices"][0]["logprobs"]
        ids = running.tokenizer.encode(prompt)
        assert len(ids) == 40 and len(logprobs["tokens"]) >= 41 and logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:40] == pytest.approx(exact_logprobs(running, ids)[1:], abs=1e-4)
        assert events[0]["choices"][0]["text"].startswith(prompt)


def test_echo_with_no_new_tokens(running: Running) -> None:
    answer = running.complete("score me", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "score me" and len(choice["logprobs"]["tokens"]) == 9
    assert answer["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    assert running.post("/v1/completions", prompt="x", max_tokens=0).status_code == 400


def test_vllms_prompt_logprobs(running: Running) -> None:
    choice = running.complete("abc", prompt_logprobs=1, max_tokens=1)["choices"][0]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 4
    ids = running.tokenizer.encode("abc")
    assert str(ids[1]) in choice["prompt_logprobs"][1]


def test_h46_no_infinity_in_json(running: Running) -> None:
    """H46: a probability of zero has a documented floor, plain and streamed."""
    body = {"prompt": "ab", "max_tokens": 2, "logit_bias": {"70": -100}, "logprobs": 5, "temperature": 0, "echo": True}
    answer = running.complete(**body)
    running.events("/v1/completions", **body)
    values = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert all(math.isfinite(value) and value >= LOGPROB_FLOOR for value in values)


def test_stop_strings_and_stop_tokens() -> None:
    with serving(says="abcdefghijklmnop") as running:
        assert running.complete("a", max_tokens=10, stop="fg")["choices"][0]["text"] == "bcde"
        running.wait_idle()
        assert running.gate.num_steps == 6, "steps were computed after the stop string had come"
        answer = running.complete("a", max_tokens=10, stop=["zz", "fg"], include_stop_str_in_output=True)
        assert answer["choices"][0]["text"] == "bcdefg" and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 6
        (f,) = running.tokenizer.encode("f", add_special_tokens=False)
        answer = running.complete("a", max_tokens=10, stop_token_ids=[f])
        assert answer["choices"][0]["text"] == "bcde" and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 5
        running.wait_idle()


def test_h22_nothing_of_a_stop_string_is_sent() -> None:
    """H22: a stop string over several tokens; what only begins like it is sent whole."""
    with serving(says="xa?b,cz") as running:
        events = running.events("/v1/completions", prompt="x", max_tokens=6, stop=["b,c"], temperature=0)
        assert streamed_text(events) == "a?" and events[-1]["choices"][0]["finish_reason"] == "stop"
        events = running.events("/v1/completions", prompt="x", max_tokens=4, stop=["b,d"], temperature=0)
        assert streamed_text(events) == "a?b," and events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("says", "length", "expected", "reason"),
    [
        ("q.hi\nUser: mo", 5, ".hi\nU", "length"),
        ("q.hi\nUser: mo", 12, ".hi", "stop"),
        ("q.hi\n", 30, ".hi\n", "stop"),
    ],
)
def test_h53_what_could_become_a_stop_comes_out_when_it_cannot(
    says: str, length: int, expected: str, reason: str
) -> None:
    """H53: streamed text is unstreamed text, whether the answer ends by length, by the stop itself or by eos."""
    with serving(says=says) as running:
        if not says.endswith("mo"):
            newline = running.tokenizer.encode("\n", add_special_tokens=False)[0]
            running.gate.inner.table[newline, 1] = 50.0
        body = {"prompt": "q", "max_tokens": length, "stop": ["\nUser:"], "temperature": 0}
        events = running.events("/v1/completions", **body)
        choice = running.complete(**body)["choices"][0]
        assert streamed_text(events) == choice["text"] == expected
        assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == reason
        for event in events:
            assert event["choices"][0]["text"] or event["choices"][0]["finish_reason"], "a chunk that says nothing"


def test_h21_characters_that_are_several_tokens_come_whole() -> None:
    """H21: bytes of one character wait for each other, in a stream and at its end."""
    with serving(says="→é世.") as running:
        events = running.events("/v1/completions", prompt="→", max_tokens=6, temperature=0)
        assert [event["choices"][0]["text"] for event in events] == ["é", "世", "."]
        cut = running.events("/v1/completions", prompt="→", max_tokens=4, temperature=0)
        assert [event["choices"][0]["text"] for event in cut] == ["é", "\ufffd"]


def test_extra_sampling_fields_are_honoured(running: Running) -> None:
    free = running.complete("hello", max_tokens=6)["choices"][0]["text"]
    banned = running.tokenizer.encode(free[0], add_special_tokens=False)[0]
    biased = running.complete("hello", max_tokens=6, logit_bias={str(banned): -100})["choices"][0]["text"]
    assert biased[0] != free[0]
    one = [running.complete("hello", temperature=1, top_k=1, max_tokens=6)["choices"][0]["text"] for _ in range(2)]
    assert one == [free, free]


def test_h48_a_seed_repeats_beside_others(running: Running) -> None:
    alone = running.complete("h", temperature=0.8, seed=42, max_tokens=20)["choices"][0]["text"]
    beside = running.complete(["h", "other", "more"], temperature=0.8, seed=42, max_tokens=20)["choices"][0]["text"]
    assert alone == beside
