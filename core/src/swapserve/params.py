"""What a client may ask of sampling, checked once when the request is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt


def _as_tuple(value: object) -> object:
    """One stop string or token id may be given without a list around it."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


class SamplingParams(BaseModel):
    """How tokens are chosen for one request and when it ends; names and meanings follow vLLM's `SamplingParams`.

    Temperature 0 is greedy decoding. `max_tokens=None` means "until the context is full".
    Raises pydantic's `ValidationError`, which names each wrong field and its allowed range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, description="0 or -1: all tokens")] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, description="over prompt and output; 1: off")] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0, description="over output only")] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0, description="over output only")] = 0.0
    logit_bias: Mapping[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = ()
    stop_token_ids: Annotated[tuple[StrictInt, ...], BeforeValidator(_as_tuple)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    skip_special_tokens: bool = True
