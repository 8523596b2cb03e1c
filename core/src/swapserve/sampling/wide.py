"""Operations along a vocabulary of a few hundred thousand words, done over chunks of it.

A row of `width * num_chunks` values is looked at as `[num_chunks, width]`: the largest value (or the sum) of each
chunk is found with vector instructions, and only the one chunk that matters is then looked at value by value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_width(vocab_size: int) -> int:
    """The divisor of the vocabulary's size that is nearest its square root, on a logarithmic scale.

    The size itself where it has no divisor within a factor of 32: rows are then one chunk, slower and as right.
    """
    root = math.sqrt(vocab_size)
    divisors = [width for width in range(1, vocab_size + 1) if vocab_size % width == 0]
    best = min(divisors, key=lambda width: abs(math.log(width / root)))
    return best if root / 32 <= best <= root * 32 else vocab_size


def chunk_maxima(rows: Tensor, width: int) -> Tensor:
    """The largest value of each chunk: `[n, vocab]` to `[n, vocab // width]`. A NaN in a chunk makes it NaN."""
    return rows.view(rows.shape[0], -1, width).amax(-1)


def first_argmax(rows: Tensor, maxima: Tensor, width: int) -> Tensor:
    """The lowest index of the largest value of each row, `[n]`; of a NaN where the row has one.

    `maxima` is `chunk_maxima(rows, width)`.
    """
    chunk = maxima.argmax(-1)
    best = rows.view(rows.shape[0], -1, width)[torch.arange(rows.shape[0], device=rows.device), chunk]
    return chunk * width + best.argmax(-1)
