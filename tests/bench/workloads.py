"""The requests that serving is measured on: lengths follow the seed alone, token ids the repetition too.

W1: 32 requests at once, log-normal lengths, at most 16 running. W2: 16 requests that share a prefix of 384 tokens.
W3: one request of 128 tokens in and 128 out. Prompts are a BOS and random ids, so that every engine sees the same
tokens, and a prefix cache finds nothing of one repetition in the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

BOS = 2
LOWEST_ID, HIGHEST_ID = 1000, 200_000


@dataclass(frozen=True)
class Job:
    """One request: its prompt and exactly how many tokens to make."""

    prompt: tuple[int, ...]
    num_new: int


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at time 0, and how many of them may run at a time."""

    jobs: tuple[Job, ...]
    max_running: int

    @property
    def num_new(self) -> int:
        return sum(job.num_new for job in self.jobs)

    @property
    def num_prompt(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)


def _ids(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count))


def _length(source: random.Random, mean: int, lowest: int, highest: int) -> int:
    """A log-normal length with that mean and a sigma of 0.6, kept within bounds."""
    sigma = 0.6
    drawn = source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(highest, max(lowest, round(drawn)))


def mixed(seed: int, repetition: int) -> Workload:
    """W1."""
    lengths, ids = random.Random(f"w1/{seed}"), random.Random(f"w1/{seed}/{repetition}")
    jobs = []
    for _ in range(32):
        num_prompt = _length(lengths, 160, 16, 512)
        num_new = _length(lengths, 100, 8, 256)
        jobs.append(Job((BOS, *_ids(ids, num_prompt - 1)), num_new))
    return Workload(tuple(jobs), 16)


def shared_prefix(seed: int, repetition: int) -> Workload:
    """W2."""
    ids = random.Random(f"w2/{seed}/{repetition}")
    prefix = (BOS, *_ids(ids, 383))
    return Workload(tuple(Job(prefix + _ids(ids, 32), 32) for _ in range(16)), 16)


def single_stream(seed: int, repetition: int) -> Workload:
    """W3."""
    ids = random.Random(f"w3/{seed}/{repetition}")
    return Workload((Job((BOS, *_ids(ids, 127)), 128),), 1)


WORKLOADS: dict[str, Callable[[int, int], Workload]] = {"w1": mixed, "w2": shared_prefix, "w3": single_stream}
