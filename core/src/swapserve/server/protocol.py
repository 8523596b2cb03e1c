"""What clients may send: OpenAI's fields that we honour, vLLM's extra sampling fields, and nothing else.

An unknown field is refused by name: ignoring it would change the answer without a word. The fields of `HARMLESS`
are accepted where they say nothing about the answer. Null means that a field is left out, but for `max_tokens`,
where it means "until the context is full".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from swapserve.params import SamplingParams
from swapserve.request import RequestRefused

MAX_CHOICES = 128
Number = Annotated[float, Field(strict=True)]
"""Whole ones too; neither a boolean nor a text."""
TOKEN_KEY = re.compile(r"-?[0-9]{1,20}")
NOT_FOR_TEMPLATES = frozenset({
    "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""What `apply_chat_template` of transformers takes for itself."""
ANYTHING = object()
NOTHING = (None,)
HARMLESS: Mapping[str, tuple[Any, str]] = {
    "user": (ANYTHING, "who the client's user is"),
    "safety_identifier": (ANYTHING, "who the client's user is"),
    "metadata": (ANYTHING, "the client's own notes"),
    "prompt_cache_key": (ANYTHING, "a hint for OpenAI's cache"),
    "parallel_tool_calls": (ANYTHING, "says nothing without tools"),
    "store": ((None, False), "whether OpenAI keeps the answer: it is not kept here"),
    "service_tier": ((None, "auto", "default"), "OpenAI's price class"),
    "tools": ((None, []), "tools the model may call"),
    "tool_choice": ((None, "none", "auto"), "says nothing without tools"),
    "functions": ((None, []), "the old name of tools"),
    "function_call": ((None, "none", "auto"), "says nothing without functions"),
    "modalities": ((None, ["text"]), "kinds of output: text is the only one here"),
    "response_format": ((None, {"type": "text"}), "the form of the answer: free text here"),
    "suffix": ((None, ""), "text after the answer"),
    "audio": (NOTHING, "spoken output"),
    "prediction": (NOTHING, "what much of the answer will be"),
    "reasoning_effort": (NOTHING, "how long to think"),
    "verbosity": (NOTHING, "how long to answer"),
    "web_search_options": (NOTHING, "searches"),
}
"""Standard fields that are no field here: the values that change nothing, which are accepted, and what they are for."""

SHARED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
"""Fields that mean the same in a request and in `SamplingParams`."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Sampling(BaseModel):
    """The fields that completions and chat share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    # vLLM's
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    priority: StrictInt = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if not cls._says_nothing(key, value)}

    @classmethod
    def _says_nothing(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return value is None and name != "max_tokens"
        accepted, _ = HARMLESS.get(name, ((), ""))
        # 0 equals False, and is no answer to a question of yes or no.
        return accepted is ANYTHING or any(type(value) is type(one) and value == one for one in accepted)

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        for one in [stop] if isinstance(stop, str) else stop or []:
            if not one:
                raise ValueError("a stop string is empty: leave it out")
        return stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true or leave it out")
        return self

    def params(self, **fields: Any) -> SamplingParams:
        """The sampling parameters of one choice; `ValidationError` names a value out of range."""
        given = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = self.stop
        if self.logit_bias:
            given["logit_bias"] = _token_keys(self.logit_bias)
        if self.prompt_logprobs is not None:
            given["prompt_logprobs"] = self.prompt_logprobs
        return SamplingParams.model_validate({**given, **fields})


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: StrictInt | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    return_token_ids: StrictBool = False
    add_special_tokens: StrictBool = True

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_of_four(cls, prompt: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(prompt)
        except ValidationError:
            # Else a union complains of each of its members, none of which the client may have meant.
            raise ValueError("give a text, a list of texts, a list of token ids or a list of such lists") from None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of is {self.best_of} and n is {self.n}: only best_of equal to n is supported")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestRefused("prompt is an empty list: give at least one token or text", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # What answers of other servers carry: clients send them back.
    refusal: Literal[None] = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: Literal[None] = None
    function_call: Literal[None] = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="wrap")
    @classmethod
    def _text_only(cls, content: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(content)
        except ValidationError:
            parts = content if isinstance(content, list) else []
            other = next((p["type"] for p in parts if isinstance(p, dict) and p.get("type", "text") != "text"), None)
            had = f": {str(other)[:40]!r} is not supported here" if other is not None else ""
            raise ValueError(f'give a text or a list of {{"type": "text", "text": "..."}} parts{had}') from None

    @property
    def length(self) -> int:
        """Characters of the content."""
        parts = self.content if isinstance(self.content, list) else ()
        return len(self.content) if isinstance(self.content, str) else sum(len(part.text) for part in parts)

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: text parts joined, absent fields left out."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        said: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.name is not None:
            said["name"] = self.name
        return said


class ChatPrompt(BaseModel):
    """How a conversation becomes a prompt."""

    model_config = ConfigDict(extra="forbid")

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    @field_validator("chat_template_kwargs")
    @classmethod
    def _for_the_template(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Names that mean something to the tokenizer would never reach the template."""
        if taken := sorted(NOT_FOR_TEMPLATES & set(given or ())):
            raise ValueError(f"{taken[0]!r} is no variable of a template")
        return given

    @model_validator(mode="after")
    def _agree_on_the_end(self) -> ChatPrompt:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message goes on with the last message: set add_generation_prompt to false")
        return self


class ChatRequest(ChatPrompt, Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeRequest(ChatPrompt):
    """`POST /tokenize`: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[StrictInt]


def _token_keys(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are texts: `{"50256": -100}`."""
    for key in bias:
        if not TOKEN_KEY.fullmatch(key):
            raise RequestRefused(f"logit_bias: {key[:40]!r} is no token id: keys are whole numbers", "logit_bias")
    return {int(key): value for key, value in bias.items()}
