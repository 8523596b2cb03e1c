"""Text to tokens and back: a thin layer over a transformers tokenizer that keeps the rules about BOS in one place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapserve.request import RequestRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece writes a byte that is no piece of its own."""


class ChatTemplateMissing(RequestRefused):
    """The model has no chat template and none was given."""


class ChatTemplateError(RequestRefused):
    """The chat template cannot render these messages, or is no template."""


class Tokenizer:
    """The tokenizer of a model, with its chat template or the one given by `--chat-template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        self.hf = tokenizer
        self.chat_template = read_template(chat_template) if chat_template else tokenizer.chat_template
        self._fast = tokenizer.backend_tokenizer
        # Several threads encode and decode: a file's own cutting and padding is turned off here, not by the first call.
        self._fast.no_truncation()
        self._fast.no_padding()
        decoders = _decoders(self._fast)
        self.byte_level = decoders == ["ByteLevel"]
        """Whether every token is bytes, and a text is the bytes of its tokens read as UTF-8."""
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {token for token, added in self._fast.get_added_tokens_decoder().items() if added.special}
        self._bytes: dict[int, bytes | None] = {}
        self._texts: dict[int, str] = {}

    @property
    def bos_token_id(self) -> int | None:
        token: int | None = self.hf.bos_token_id
        return token

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be answered."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a BOS is added where the tokenizer adds one, and never a second."""
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids, as the tokenizer joins them."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes | None:
        """The bytes a token stands for, which may be part of a character; None for one that is text of its own."""
        if skip_special_tokens and token in self._special:
            return b"" if self.byte_level else None
        try:
            return self._bytes[token]
        except KeyError:
            piece: str | None = self._fast.id_to_token(token)
            return self._bytes.setdefault(token, self._as_bytes(piece))

    def _as_bytes(self, piece: str | None) -> bytes | None:
        if self.byte_level:
            if piece is None:
                return b""
            # A piece with a letter that stands for no byte is an added token, written as it is.
            alphabet = _BYTE_OF_LETTER
            return bytes(map(alphabet.__getitem__, piece)) if all(map(alphabet.__contains__, piece)) else piece.encode()
        found = BYTE_PIECE.fullmatch(piece) if self._byte_fallback and piece else None
        return bytes.fromhex(found[1]) if found else None

    def token_text(self, token: int) -> str:
        """One token by itself, as log-probabilities show it: with the space that a text's first token would lose."""
        try:
            return self._texts[token]
        except KeyError:
            text = self.decode([token])
            piece: str | None = self._fast.id_to_token(token)
            if piece is not None and piece.startswith("\u2581") and not text.startswith((" ", "\u2581")):
                text = " " + text
            return self._texts.setdefault(token, text)

    def vocabulary(self) -> Mapping[str, int]:
        """Token text to token id, special and added tokens included."""
        vocabulary: Mapping[str, int] = self.hf.get_vocab()
        return vocabulary

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the request's template, the server's or the model's."""
        template = chat_template or self.chat_template
        if template is None:
            raise ChatTemplateMissing(
                "this model has no chat template: start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        try:
            return str(
                self.hf.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(template_kwargs or {}),
                )
            )
        except Exception as error:
            # A template is a program of its own: whatever it raises is about these messages.
            raise ChatTemplateError(f"the chat template refuses these messages: {error}", "messages") from error

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered conversation: one BOS, the template's own or the one the tokenizer would add."""
        ids = self.encode(text, add_special_tokens=False)
        bos = self.bos_token_id
        if bos is not None and ids[:1] != [bos] and self.encode("")[:1] == [bos]:
            ids.insert(0, bos)
        return ids


def read_template(source: str) -> str:
    """A chat template given as a file, or as the text of one; `ValueError` when it is neither."""
    path = Path(source).expanduser()
    try:
        if path.is_file():
            return path.read_text()
    except OSError:
        pass  # a template's text may be too long for a path
    if "{" in source:
        return source
    raise ValueError(f"--chat-template: there is no file {source}, and it is not the text of a template either")


def _decoders(fast: Any) -> list[str]:
    """The kinds of the steps that make text of tokens, in order."""
    if fast.decoder is None:
        return []
    state = json.loads(fast.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps]


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers (GPT-2's way) write bytes as: printable ones as themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
