"""How long the sampler takes for 16 rows of 262,144 logits, beyond computing them.

Run it by itself: `python tests/sampler/bench_sampler.py`. Each figure is the best of several steps, in milliseconds.
"""

from __future__ import annotations

import time

import torch

from swapserve.batch import Batch, Slice, Work
from swapserve.params import SamplingParams
from swapserve.request import Request
from swapserve.sampler import Sampler, plan_rows

NUM_ROWS, VOCAB_SIZE, CONTEXT = 16, 262_144, 4_000
KINDS = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, repetition 1.1": {"temperature": 0, "repetition_penalty": 1.1},
    "greedy, logprobs 5": {"temperature": 0, "logprobs": 5},
}


def logit_rows(nucleus: int) -> torch.Tensor:
    """Rows in which about `nucleus` words are likely and the others are far below them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * 1.5
    for row in rows:
        row[torch.randperm(VOCAB_SIZE, generator=generator)[:nucleus]] += torch.linspace(14, 11, nucleus)
    return rows


def milliseconds(kind: dict[str, float], rows: torch.Tensor, num_steps: int = 9) -> float:
    """The best time of a step that judges one row for each of 16 requests."""
    prompt = tuple(range(CONTEXT))
    requests = [Request(str(i), prompt, SamplingParams(**kind), seed=i) for i in range(len(rows))]
    batch = Batch([Work(Slice(request, CONTEXT - 1, 1), [0], [0]) for request in requests], 16)
    sampler, logits, best = Sampler(rows.shape[1]), rows.clone(), float("inf")
    for _ in range(num_steps):
        logits.copy_(rows)
        start = time.perf_counter()
        sampler.judge(batch, plan_rows(batch), lambda begin, end: logits[begin:end])
        best = min(best, time.perf_counter() - start)
    return best * 1000


def main() -> None:
    """Print a table: kinds by number of threads."""
    narrow, wide = logit_rows(40), logit_rows(1_000)
    print(f"{'ms a step, 16 rows x 262,144':32s} 1 thread  2 threads")
    cases = [(name, kind, narrow) for name, kind in KINDS.items()]
    cases += [("top_p 0.9, nucleus of 900", KINDS["top_p 0.9"], wide)]
    cases += [("top_p 0.9, all but even", KINDS["top_p 0.9"], torch.randn(NUM_ROWS, VOCAB_SIZE) * 0.1)]
    cases += [("greedy, 256 rows of 64", KINDS["greedy"], torch.randn(256, 64))]
    for name, kind, rows in cases:
        figures = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            figures.append(milliseconds(kind, rows))
        print(f"{name:32s} {figures[0]:8.2f} {figures[1]:10.2f}")


if __name__ == "__main__":
    main()
