"""Text token by token: whole characters, the whole text, nothing of a stop string."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from serving import TEMPLATE, byte_ids, byte_tokenizer

from swapserve import SamplingParams
from swapserve.detokenizer import TextStream
from swapserve.tokenizer import ChatTemplateError, ChatTemplateMissing, Tokenizer, read_template

TEXTS = ["🏳️‍🌈", "e\u0301 and é", "世界", "plain words,  two spaces\n\nand lines", "a\u200db", "𒀀"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def stream(tokenizer: Tokenizer, tokens: list[int], **params: object) -> list[str]:
    made = TextStream(tokenizer, tokenizer.encode("before"), SamplingParams.model_validate(params))
    return [*(made.push([token]) for token in tokens), made.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_h21_the_stream_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    """H21: split over tokens of one byte each, nothing is shown that a later token completes."""
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_h21_an_invalid_byte_does_not_hold_up_what_follows(tokenizer: Tokenizer) -> None:
    tokens = byte_ids(tokenizer.hf, b"ab\xffcd\xc3")
    pieces = stream(tokenizer, tokens)
    assert "".join(pieces) == "ab\ufffdcd\ufffd" and "".join(pieces[:4]) == "ab\ufffdc"


def test_random_bytes_give_the_whole_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(21)
    for _ in range(200):
        text = "".join(rng.choice("aé世🌈 \n") for _ in range(20)).encode()
        cut = rng.randrange(len(text))
        data = text[:cut] + bytes([rng.choice((0xFF, 0xC3))]) + b"." + text[cut:]
        tokens = byte_ids(tokenizer.hf, data)
        assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_h21_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Counted in tokens decoded, not in seconds: after 10,000 tokens each still decodes a window."""
    made = TextStream(tokenizer, [], SamplingParams())
    decoded: list[int] = []
    decode = tokenizer.decode

    def counting(ids: list[int], skip_special_tokens: bool = False) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special_tokens)

    tokenizer.decode = counting  # type: ignore[method-assign, assignment]
    try:
        for number in range(10_000):
            made.push([2 + number % 250])
    finally:
        del tokenizer.decode  # type: ignore[method-assign]
    assert max(decoded) <= 16 and len(decoded) <= 20_001


@pytest.mark.parametrize(
    ("text", "stops", "expected", "used"),
    [
        ("a,b,c,d", ["b,c"], "a,", 5),
        ("a,b,d", ["b,c"], "a,b,d", 5),
        ("xxabab", ["abab"], "xx", 6),
        ("aab", ["ab", "b"], "a", 3),
        ("one two", ["two", "one"], "", 3),
        ("ends in \n", ["\n\nUser"], "ends in \n", 9),
    ],
)
def test_h22_stop_strings(tokenizer: Tokenizer, text: str, stops: list[str], expected: str, used: int) -> None:
    made = TextStream(tokenizer, [], SamplingParams(stop=tuple(stops)))
    said = made.push(tokenizer.encode(text, add_special_tokens=False)) + made.finish()
    assert said == expected and made.num_tokens == used and made.stopped == (expected != text)


def test_h53_only_what_can_become_a_stop_is_held(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode("ab\nc\n\nUx", add_special_tokens=False), stop=["\n\nUser:"])
    assert pieces == ["a", "b", "", "\nc", "", "", "", "\n\nUx", ""]


def test_a_stop_string_waits_for_min_tokens(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode("xyxyxy", add_special_tokens=False), stop=["y"], min_tokens=3)
    assert "".join(pieces) == "xyx"


def test_h24_one_bos_never_two(tokenizer: Tokenizer) -> None:
    """H24: a template that renders its own, a tokenizer that adds one, and a text that brings one."""
    chat = tokenizer.encode_chat(tokenizer.render_chat([{"role": "user", "content": "hi"}]))
    bare = Tokenizer(byte_tokenizer(), TEMPLATE.removeprefix("{{ bos_token }}"))
    other = bare.encode_chat(bare.render_chat([{"role": "user", "content": "hi"}]))
    assert chat == other and chat[0] == 0 and chat.count(0) == 1
    assert tokenizer.encode("hi")[:2] == [0, tokenizer.encode("h", False)[0]]
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert Tokenizer(byte_tokenizer(bos=False)).encode("hi") == tokenizer.encode("hi")[1:]


def test_h44_no_template_and_a_template_that_fails() -> None:
    without = Tokenizer(byte_tokenizer(chat_template=None))
    assert not without.has_chat_template
    with pytest.raises(ChatTemplateMissing, match="--chat-template"):
        without.render_chat([{"role": "user", "content": "hi"}])
    broken = Tokenizer(byte_tokenizer(), "{{ raise_exception('only one message, please') }}")
    with pytest.raises(ChatTemplateError, match="only one message, please"):
        broken.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert read_template(str(path)) == "{{ messages }}" and read_template("{{ x }}") == "{{ x }}"
    with pytest.raises(ValueError, match=r"no file nowhere\.jinja"):
        read_template("nowhere.jinja")
