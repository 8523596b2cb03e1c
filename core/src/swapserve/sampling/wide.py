"""Operations along a vocabulary of a few hundred thousand words, done over chunks of it.

A row of `num_chunks * width` values is looked at as `[num_chunks, width]`: the largest value (or the sum) of each
chunk is found with vector instructions, and only the chunks that matter are then looked at value by value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOT_A_NUMBER = -1
"""Stands for a token where there is none to choose: the logits hold a NaN or an infinity."""


def chunk_width(vocab_size: int) -> int:
    """The divisor of the vocabulary's size that is nearest its square root, on a logarithmic scale.

    The size itself where it has no divisor within a factor of 32: rows are then one chunk, slower and as right.
    """
    root = math.sqrt(vocab_size)
    divisors = [width for width in range(1, vocab_size + 1) if vocab_size % width == 0]
    best = min(divisors, key=lambda width: abs(math.log(width / root)))
    return best if root / 32 <= best <= root * 32 else vocab_size


def in_chunks(rows: Tensor, width: int) -> Tensor:
    """`[n, vocab]` seen as `[n, vocab // width, width]`."""
    return rows.view(rows.shape[0], rows.shape[1] // width, width)


def chunk_maxima(rows: Tensor, width: int) -> Tensor:
    """The largest value of each chunk: `[n, vocab]` to `[n, vocab // width]`. A NaN in a chunk makes it NaN."""
    return in_chunks(rows, width).amax(-1)


def first_argmax(rows: Tensor, maxima: Tensor, width: int) -> Tensor:
    """The lowest index of the largest value of each row, `[n]`; of a NaN where the row has one.

    `maxima` is `chunk_maxima(rows, width)`.
    """
    chunk = maxima.argmax(-1)
    return chunk * width + _pick(rows, chunk, width).argmax(-1)


def draw(weights: Tensor, uniform: Tensor, width: int) -> Tensor:
    """One index a row, with probability in proportion to `weights` `[n, vocab]`; `NOT_A_NUMBER` where they have no sum.

    Inverts the cumulative sum at `uniform` `[n]` (float64, in [0, 1)), in order of index. A chunk's sum is taken
    in the weights' precision, the sums over chunks and within the chosen one in float64; each row is computed by
    itself, so that its answer is the same in any batch.
    """
    cumulative = in_chunks(weights, width).sum(-1).double().cumsum(-1)
    total = cumulative[:, -1]
    target = uniform * total  # less than the total, however it rounds
    chunk = (cumulative <= target.unsqueeze(1)).sum(-1).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    inside = _pick(weights, chunk, width).double().cumsum(-1)
    # The chunk's sum in the weights' precision may exceed the one in float64: stay inside the chunk.
    rest = torch.minimum(target - before, torch.nextafter(inside[:, -1], torch.zeros_like(total)))
    index = chunk * width + (inside <= rest.unsqueeze(1)).sum(-1)
    return torch.where(total.isfinite() & (total > 0), index, NOT_A_NUMBER)


def chosen_rows(rows: Tensor, index: list[int]) -> Tensor:
    """`rows[index]` for an ascending index: a copy, unless that is all of them."""
    if len(index) == rows.shape[0]:
        return rows
    return rows.index_select(0, torch.tensor(index, device=rows.device))


def _pick(rows: Tensor, chunk: Tensor, width: int) -> Tensor:
    """One chunk of each row: `[n, width]`."""
    return in_chunks(rows, width)[torch.arange(rows.shape[0], device=rows.device), chunk]
