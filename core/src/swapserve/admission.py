"""What a request must satisfy to be let in: a request that can never run is refused at once, with a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swapserve.params import SamplingParams
from swapserve.plan import Limits
from swapserve.policies import KVManager, Scheduler
from swapserve.request import RequestRefused


def check_token_ids(prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestRefused` for an empty prompt and for any token id outside the vocabulary, wherever it stands."""
    if not prompt:
        raise RequestRefused("the prompt is empty: give at least one token", "prompt")
    fields: dict[str, Iterable[int]] = {
        "prompt": prompt,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in fields.items():
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestRefused(
                    f"{name}: token id {token!r} is outside the vocabulary; ids are whole numbers "
                    f"from 0 to {vocab_size - 1}",
                    name,
                )


def greatest_length(
    num_prompt: int, max_tokens: int | None, limits: Limits, kv: KVManager, scheduler: Scheduler
) -> int:
    """The length, prompt and output, at which a request ends; `RequestRefused` when it can never get there.

    The last token of a request is never stored, so a request of `n` tokens holds `n - 1` slots.
    """
    context, slots = limits.max_model_len, kv.longest()
    if num_prompt >= context:
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens and the model's context is {context}, of which at least one "
            "must be left for the answer: shorten the prompt or raise --max-model-len",
            "prompt",
        )
    if max_tokens is not None and num_prompt + max_tokens > context:
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together more than the model's "
            f"context of {context}; lower max_tokens or raise --max-model-len",
            "max_tokens",
        )
    needed = num_prompt + (max_tokens or 1) - 1
    if needed > slots:
        asked = f" and max_tokens is {max_tokens}" if max_tokens is not None else ""
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens{asked}: {needed} KV slots, but the whole cache can hold {slots} for "
            "one request; shorten the request, or raise --kv-cache-memory-bytes (or --num-gpu-blocks-override)",
            "prompt" if num_prompt > slots else "max_tokens",
        )
    if not scheduler.splits_prompts and num_prompt > limits.max_num_batched_tokens:
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens, and scheduler {scheduler.name!r} computes a prompt in one step of "
            f"at most {limits.max_num_batched_tokens}: raise --max-num-batched-tokens or use --scheduler chunked",
            "prompt",
        )
    return num_prompt + max_tokens if max_tokens is not None else min(context, slots + 1)
