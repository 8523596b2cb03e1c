"""Seeded workloads for the ghost: few requests, small blocks, tight to ample memory, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swapserve.policies import ModelInfo
from swapserve.testing.ghost import GhostModel, ghost_info

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Arrival:
    """One request of a workload: when it comes (in steps), what it asks, and when its client leaves, if it does."""

    step: int
    prompt: tuple[int, ...]
    params: Mapping[str, object] = field(default_factory=dict)
    cache_salt: str | None = None
    abort_at: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests, and the engine they meet."""

    seed: int
    arrivals: Sequence[Arrival]
    info: ModelInfo
    model: GhostModel
    num_blocks: int
    follow_rejected: bool
    """Whether prompts made of rejected drafts are sent as well, to find blocks published with unverified tokens."""


def make_workload(seed: int) -> Workload:
    """The workload of a seed: the same on every machine."""
    rng = random.Random(f"swapserve/{seed}")
    model = GhostModel(vocab_size=rng.choice((6, 16, 48)), seed=seed % 17)
    longest_prompt = rng.choice((6, 12, 20, 28))
    longest_output = rng.choice((1, 6, 14))
    context = longest_prompt + longest_output + rng.choice((0, 1, 8))
    # From just enough for one request of the greatest length to room for all of them.
    least = -(-(longest_prompt + longest_output - 1) // BLOCK_SIZE)
    num_blocks = least + rng.choice((0, 0, 1, 2, least, 3 * least, 8 * least))
    info = ghost_info(
        model,
        max_model_len=context,
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=longest_prompt + rng.choice((0, 1, 7, 60)),
        eos_token_ids=frozenset(rng.sample(range(model.vocab_size), rng.choice((0, 0, 1)))),
    )
    prompts: list[tuple[int, ...]] = []
    arrivals = []
    step = 0
    for _ in range(rng.randint(3, 9)):
        step += rng.choice((0, 0, 0, 1, 3))
        prompt = _prompt(rng, model, prompts, longest_prompt)
        prompts.append(prompt)
        params: dict[str, object] = {"temperature": 0.0, "max_tokens": rng.randint(1, longest_output)}
        if rng.random() < 0.1:
            params["max_tokens"] = None
        if rng.random() < 0.15:
            params["stop_token_ids"] = [rng.randrange(model.vocab_size)]
            params["min_tokens"] = rng.choice((0, 1))
        if rng.random() < 0.1:
            params["ignore_eos"] = True
        arrivals.append(
            Arrival(
                step,
                prompt,
                params,
                cache_salt=rng.choice((None, None, None, "a", "b")),
                abort_at=step + rng.randint(0, 12) if rng.random() < 0.15 else None,
            )
        )
    return Workload(seed, arrivals, info, model, num_blocks, follow_rejected=rng.random() < 0.5)


def _prompt(rng: random.Random, model: GhostModel, earlier: list[tuple[int, ...]], longest: int) -> tuple[int, ...]:
    """A fresh prompt, an earlier one again, one that shares a prefix, or a conversation that goes on."""
    kind = rng.choice(("fresh", "fresh", "again", "branch", "turn")) if earlier else "fresh"
    if kind == "fresh":
        return tuple(rng.randrange(model.vocab_size) for _ in range(rng.randint(1, longest)))
    base = rng.choice(earlier)
    if kind == "again":
        return base
    if kind == "branch":
        base = base[: rng.randint(1, len(base))]
        own = [rng.randrange(model.vocab_size) for _ in range(rng.randint(0, longest - len(base)))]
        return base + tuple(own)
    tokens = list(base)
    while len(tokens) < rng.randint(len(base), longest):
        tokens.append(model.next_token(tokens))
    return tuple(tokens)
