"""Random numbers that depend on nothing but the request's seed, the token's position and what they are for.

A generator that is advanced from draw to draw would make a request's tokens depend on its neighbours in the batch, on
how many draws were thrown away with rejected drafts, and on whether it was preempted. A counter-based one has no
state: the number for a position can be computed at any time, again and again.

The mixing is SplitMix64's (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014),
keyed by the mixed seed, with position and stream as its counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1


class Stream(IntEnum):
    """What a number is for; those of one position are independent of each other."""

    DRAW = 0
    """Draws a token from the distribution of its position."""
    ACCEPT = 1
    """Decides whether a draft token is accepted."""
    RESIDUAL = 2
    """Draws the token that takes a rejected one's place."""


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each seed and absolute position, `[n]`, with 53 random bits.

    Seeds are taken modulo 2**64.
    """
    keys = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _STEP)
    counters = np.array(positions, dtype=np.uint64) * np.uint64(len(Stream)) + np.uint64(stream + 1)
    bits = _mix(keys + counters * _STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
