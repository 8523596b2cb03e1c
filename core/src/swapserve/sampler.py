"""From logits to tokens: one verdict for each slice of a batch.

Every row that yields a token is judged by itself, as if the draft tokens before it had been accepted: that gives one
*emitted* token a row. A work's answer is its rows' emitted tokens up to the first that differs from the draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swapserve.batch import Batch, Verdict
from swapserve.request import Request
from swapserve.sampling.rows import RowPlan, Span, plan_rows
from swapserve.sampling.wide import chunk_maxima, chunk_width, first_argmax

__all__ = ["RowPlan", "Sampler", "plan_rows"]

BLOCK_BYTES = 32 << 20
"""The most logits asked for at once: 32 rows of a vocabulary of 262,144."""
NOT_A_NUMBER = -1
"""Stands for the token of a row that has none: its logits hold a NaN or an infinity."""


class Sampler:
    """Chooses tokens from logits, and verifies drafts against them.

    `vocab_size` is the width of the logits; `device` is where they are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._width = chunk_width(vocab_size)
        self._block_rows = max(1, BLOCK_BYTES // (4 * vocab_size))

    def judge(self, batch: Batch, rows: RowPlan, logits: Callable[[int, int], Tensor]) -> list[Verdict]:
        """Choose the tokens of a batch: one verdict a work, in order.

        `rows` is `plan_rows(batch)`; `logits(a, b)` computes the float32 logits `[b - a, vocab]` of rows a to b - 1,
        is called once for each block of rows, in order, and its answer may be written to.
        """
        emitted: list[Tensor] = []
        for begin in range(0, len(rows), self._block_rows):
            block = logits(begin, min(len(rows), begin + self._block_rows))
            maxima = chunk_maxima(block, self._width)
            ids = first_argmax(block, maxima, self._width)
            emitted.append(torch.where(maxima.amax(-1).isfinite(), ids, NOT_A_NUMBER))
        tokens = torch.cat(emitted).tolist() if emitted else []
        return [
            _verdict(work.slice.request, span, tokens) if span.num_judged else Verdict()
            for work, span in zip(batch.works, rows.spans, strict=True)
        ]

    def forget(self, request: Request) -> None:
        """The request is finished or aborted: drop what is kept for it. Harmless for one never seen."""


def _verdict(request: Request, span: Span, emitted: list[int]) -> Verdict:
    """The emitted tokens of a work up to the first that differs from its draft."""
    first = span.first_judged
    num_draft = span.num_judged - 1
    draft = request.draft.tokens if num_draft and request.draft else ()
    num_accepted = 0
    while num_accepted < num_draft and emitted[first + num_accepted] == draft[num_accepted]:
        num_accepted += 1
    tokens = emitted[first : first + num_accepted + 1]
    if tokens[-1] < 0:
        return Verdict(error="The model's logits are not finite numbers for this request, so that no token can be chosen.")
    return Verdict(tokens)
