"""Text to tokens and back: a thin layer over a transformers tokenizer that keeps the rules about BOS in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapserve.request import RequestRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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

    def token_text(self, token: int) -> str:
        """One token by itself, as log-probabilities show it."""
        return self.decode([token])

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
        """Token ids of a rendered conversation: the template's own BOS is the only one."""
        bos = self.hf.bos_token
        return self.encode(text, add_special_tokens=not (bos and text.startswith(bos)))


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
