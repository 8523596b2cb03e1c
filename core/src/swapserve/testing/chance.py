"""A model of chance: next-token probabilities from a small table, sampled and verified by the real sampler.

Its exact distribution is known, so that sampled output with any speculator can be held against it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swapserve.batch import Batch, Verdict
from swapserve.engine import Engine
from swapserve.params import SamplingParams
from swapserve.policies import ModelInfo, OpenModel, Speculator
from swapserve.request import Request
from swapserve.testing.simple import SimpleKV, SimpleScheduler

if TYPE_CHECKING:
    import torch


class ChanceExecutor:
    """The logits after a token are a row of `table` `[vocab, vocab]`; sampling is the engine's own."""

    def __init__(self, table: torch.Tensor) -> None:
        from swapserve.sampler import Sampler

        self.table = table
        self.sampler = Sampler(table.shape[0], table.device)

    def execute(self, batch: Batch) -> list[Verdict]:
        import torch

        from swapserve.sampler import plan_rows

        rows = plan_rows(batch)
        packed = [token for work in batch.works for token in work.token_ids]
        last = torch.tensor([packed[index] for index in rows.index], dtype=torch.long)
        return self.sampler.judge(batch, rows, lambda first, end: self.table[last[first:end]].clone())

    def forget(self, request: Request) -> None:
        self.sampler.forget(request)


def chance_table(vocab_size: int, seed: int, like: torch.Tensor | None = None, noise: float = 1.0) -> torch.Tensor:
    """Random logits `[vocab, vocab]`; with `like`, those plus noise: a draft model that is near its target."""
    import torch

    drawn = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * noise
    return drawn if like is None else like + drawn


def chance_info(table: torch.Tensor, draft_table: torch.Tensor | None = None) -> ModelInfo:
    """The chance model as policies see it; `open_model` opens one with `draft_table`, or its own table."""

    def open_model(name: str) -> OpenModel:
        return OpenModel(
            info, lambda num_blocks, block_size: ChanceExecutor(table if draft_table is None else draft_table)
        )

    info = ModelInfo(
        name="chance",
        vocab_size=table.shape[0],
        max_model_len=64,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        open_model=open_model,
    )
    return info


def sample_outputs(
    speculator: Speculator, table: torch.Tensor, prompt: Sequence[int], params: SamplingParams, count: int, seed: int
) -> list[tuple[int, ...]]:
    """The outputs of `count` requests with one prompt, served together."""
    engine = Engine(
        executor=ChanceExecutor(table),
        scheduler=SimpleScheduler(SimpleScheduler.Options()),
        kv=SimpleKV(SimpleKV.Options(block_size=8), 8 * 8 * 64),
        speculator=speculator,
        model=speculator.target,
        seed=seed,
    )
    requests = [engine.submit(prompt, params) for _ in range(count)]
    for _ in engine.run():
        pass
    return [tuple(request.output) for request in requests]


def exact_probabilities(
    table: torch.Tensor, last: int, length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of `length` tokens after `last`, by the plain definition of the parameters."""
    rows = [_processed(table[token].tolist(), params) for token in range(table.shape[0])]
    found = {}
    for sequence in itertools.product(range(table.shape[0]), repeat=length):
        probability, before = 1.0, last
        for token in sequence:
            probability *= rows[before][token]
            before = token
        found[sequence] = probability
    return found


def _processed(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Softmax at a temperature, then top-k and top-p, one token at a time."""
    import math

    weights = [math.exp(value / params.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = set(), 0.0
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.add(token)
        mass += weights[token]
    return [weight / mass if token in kept else 0.0 for token, weight in enumerate(weights)]


def chi_square(outputs: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of Pearson's test that the outputs were drawn from `expected`; cells with few counts are pooled."""
    import torch

    counts = Counter(outputs)
    if any(expected.get(output, 0.0) == 0.0 for output in counts):
        return 0.0
    statistic, cells, rest_seen, rest_expected = 0.0, 0, 0.0, 0.0
    for output, probability in expected.items():
        want = probability * len(outputs)
        if want < 5:
            rest_seen, rest_expected = rest_seen + counts[output], rest_expected + want
            continue
        statistic += (counts[output] - want) ** 2 / want
        cells += 1
    if rest_expected >= 1:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def random_prompt(vocab_size: int, seed: int, length: int = 6) -> list[int]:
    """A prompt that repeats itself, so that a look-up finds something."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)] * 2
