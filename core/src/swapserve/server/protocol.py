"""What clients may send: OpenAI's fields that we honour, vLLM's extra sampling fields, and nothing else.

An unknown field is refused by name: ignoring it would change the answer without a word. The fields of
`HARMLESS` say something about the client and nothing about the answer, and are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from swapserve.params import SamplingParams
from swapserve.request import RequestRefused

MAX_CHOICES = 128
HARMLESS = {
    "user": "who the client's user is",
    "metadata": "the client's own notes",
    "store": "whether OpenAI keeps the answer",
    "service_tier": "OpenAI's price class",
    "safety_identifier": "who the client's user is",
    "prompt_cache_key": "a hint for OpenAI's cache",
    "parallel_tool_calls": "says nothing without tools",
}
"""Standard fields that cannot change the answer here, and what they are for elsewhere."""

SHARED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
"""Fields that mean the same in a request and in `SamplingParams`."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(BaseModel):
    """The fields that completions and chat share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: StrictInt | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # vLLM's
    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: StrictInt | None = None
    priority: StrictInt = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if key not in HARMLESS}
        return data

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
    echo: bool = False
    best_of: StrictInt | None = None
    suffix: Literal[None] = None
    add_special_tokens: bool = True

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
    refusal: Literal[None] = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: text parts joined, absent fields left out."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        said: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.name is not None:
            said["name"] = self.name
        return said


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Literal[None] = None
    tool_choice: Literal["none", None] = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message goes on with the last message: set add_generation_prompt to false")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a prompt, or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

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
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError:
        wrong = next(key for key in bias if not key.lstrip("-").isdigit())
        raise RequestRefused(f"logit_bias: {wrong!r} is no token id: keys are whole numbers", "logit_bias") from None
