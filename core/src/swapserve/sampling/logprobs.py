"""Log-probabilities of chosen tokens and of the likeliest ones, from logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swapserve.request import LOGPROB_FLOOR, TokenLogprobs
from swapserve.sampling.truncation import top_tokens
from swapserve.sampling.wide import chunk_maxima, in_chunks


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: Sequence[int], width: int) -> list[TokenLogprobs]:
    """The log-probability and rank of one token a row, and the `num_top` likeliest of each row.

    logits: raw, `[n, vocab]`. tokens: `[n]`. The rank is 1 more than the number of tokens that are likelier.
    Of equally likely tokens the lowest id comes first. Nothing is below `LOGPROB_FLOOR`.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    likelier = torch.gt(logits, chosen, out=torch.empty_like(logits))  # as numbers: bools are slow to add up
    ranks = (in_chunks(likelier, width).sum(-1).long().sum(-1) + 1).tolist()
    own = (chosen - normaliser).clamp(min=LOGPROB_FLOOR).squeeze(1).tolist()
    most = max(num_top)
    top: list[list[tuple[int, float]]] = [[]] * len(ranks)
    if most:
        ids, values = top_tokens(logits, chunk_maxima(logits, width), min(most, logits.shape[1]), width)
        values = (values - normaliser).clamp(min=LOGPROB_FLOOR)
        top = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprobs(token, logprob, rank, tuple(likeliest[:number]))
        for token, logprob, rank, likeliest, number in zip(tokens.tolist(), own, ranks, top, num_top, strict=True)
    ]
