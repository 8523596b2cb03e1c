"""Text token by token: whole characters, the whole text, nothing of a stop string."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

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


def test_h21_any_bytes_give_the_whole_decode(tokenizer: Tokenizer) -> None:
    """H21: characters with bytes put in and doubled anywhere: what is shown is what all tokens decode to."""
    rng = random.Random(21)
    for _ in range(500):
        data = "".join(rng.choice("aé世🌈 \n") for _ in range(12)).encode()
        for _ in range(rng.randint(1, 6)):
            cut = rng.randrange(len(data))
            data = data[:cut] + bytes([rng.choice((0xFF, 0xC3, 0xE4, 0xF0, 0x9F))]) * rng.choice((1, 1, 9)) + data[cut:]
        tokens = byte_ids(tokenizer.hf, data)
        assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


def fallback_tokenizer(*, strip: bool = False) -> Tokenizer:
    """Pieces in SentencePiece's way: spaces as ▁, characters without a piece as bytes; `strip` as Llama 2 does."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "é", "."]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>"))


def ids_of(tokenizer: Tokenizer, *pieces: str | bytes) -> list[int]:
    """Ids of pieces, and of bytes one by one."""
    names = [[piece] if isinstance(piece, str) else [f"<0x{byte:02X}>" for byte in piece] for piece in pieces]
    return [int(tokenizer.hf.convert_tokens_to_ids(name)) for one in names for name in one]


@pytest.mark.parametrize("strip", [False, True])
def test_h21_characters_of_byte_tokens_come_whole(strip: bool) -> None:
    """H21: byte tokens between pieces wait for each other, and spaces that join pieces stay right."""
    made = fallback_tokenizer(strip=strip)
    rng = random.Random(3)
    for _ in range(300):
        parts = [rng.choice(["▁", "▁the", "a", "é", ".", "世".encode(), "🌈".encode()]) for _ in range(12)]
        tokens = ids_of(made, *parts)
        pieces = stream(made, tokens)
        assert not any("\ufffd" in piece for piece in pieces)
        before = made.encode("before")
        assert "".join(pieces) == made.decode(before + tokens)[len(made.decode(before)) :]


def test_h21_a_wrong_byte_costs_no_character_beside_it() -> None:
    """H21: what was shown stays, what follows is shown at once; the library's decoder would give up the whole run."""
    made = fallback_tokenizer()
    tokens = ids_of(made, "a", "世".encode() + b"\xff" + "世é".encode(), "▁the")
    assert made.decode(tokens) == "a" + "\ufffd" * 9 + " the"
    assert stream(made, tokens) == ["a", "", "", "世", "\ufffd", "", "", "世", "", "é", " the", ""]


def test_h21_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Counted in tokens decoded, not in seconds: after 10,000 tokens each still decodes a window at most."""
    for one in (tokenizer, fallback_tokenizer()):
        made = TextStream(one, [], SamplingParams())
        decoded: list[int] = []
        decode = one.decode

        def counting(
            ids: list[int], skip: bool = False, decode: Any = decode, decoded: list[int] = decoded
        ) -> str:
            decoded.append(len(ids))
            return str(decode(ids, skip))

        one.decode = counting  # type: ignore[method-assign, assignment]
        try:
            for number in range(10_000):
                made.push([3 + number % (len(one.hf) - 3)])
        finally:
            del one.decode  # type: ignore[method-assign]
        assert max(decoded, default=0) <= 16 and len(decoded) <= 20_001 and len(made._ids) <= 16


def test_tokens_by_themselves() -> None:
    """As log-probabilities show them: the space that begins a word, and the bytes of half a character."""
    made = fallback_tokenizer(strip=True)
    the, half = ids_of(made, "▁the", b"\xe4")
    assert made.decode([the]) == "the" and made.token_text(the) == " the"
    assert made.token_bytes(half) == b"\xe4" and made.token_bytes(the) is None
    level = Tokenizer(byte_tokenizer())
    assert [level.token_bytes(token) for token in byte_ids(level.hf, b"a \xe4")] == [b"a", b" ", b"\xe4"]
    assert level.token_bytes(1) == b"</s>" and level.token_bytes(1, skip_special_tokens=True) == b""


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


def test_h24_a_conversation_gets_no_end_from_the_tokenizer() -> None:
    """H24: a tokenizer that also puts an end behind each text puts none behind a conversation to be gone on with."""
    hf = byte_tokenizer(chat_template="{{ messages[0]['content'] }}")
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = Tokenizer(hf)
    hi = byte_ids(hf, b"hi")
    assert made.encode("hi") == [0, *hi, 1] and made.encode_chat("hi") == made.encode_chat("<s>hi") == [0, *hi]


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
