"""Changes to logits before a token is chosen: logit bias, the `min_tokens` mask, then penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swapserve.params import SamplingParams


class Adjustments:
    """The changes to one block of logits, gathered over its rows and applied at once.

    Each touches only the tokens it names, so that a row costs in proportion to those and not to the vocabulary.
    """

    def __init__(self) -> None:
        self._added: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []
        self._penalised: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32], SamplingParams]] = []

    def add(self, row: int, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
        """Add `values` to the logits of `ids`."""
        self._added.append((row, ids, values))

    def forbid(self, row: int, ids: npt.NDArray[np.int64]) -> None:
        """Make `ids` impossible: minus infinity is added, not written, so that a NaN or an infinity still shows."""
        self._added.append((row, ids, np.full(len(ids), -np.inf, dtype=np.float32)))

    def penalise(
        self, row: int, ids: npt.NDArray[np.int64], counts: npt.NDArray[np.float32], params: SamplingParams
    ) -> None:
        """Penalise `ids`, the distinct tokens so far, of which the output holds `counts`."""
        self._penalised.append((row, ids, counts, params))

    def apply(self, logits: Tensor) -> None:
        """Change `logits` `[n, vocab]` in place: what is added first, then the penalties.

        Repetition divides a positive logit and multiplies a negative one (Keskar et al., "CTRL", 2019); frequency
        is subtracted once for each time a token is in the output, presence once if it is there at all.
        """
        if self._added:
            rows, ids = _places([(row, ids) for row, ids, _ in self._added], logits.device)
            values = torch.from_numpy(np.concatenate([values for _, _, values in self._added])).to(logits.device)
            logits.index_put_((rows, ids), values, accumulate=True)  # a token may be both biased and forbidden
        if self._penalised:
            rows, ids = _places([(row, ids) for row, ids, _, _ in self._penalised], logits.device)
            counts = torch.from_numpy(np.concatenate([counts for _, _, counts, _ in self._penalised]))
            strengths = torch.tensor(
                [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for *_, p in self._penalised]
            )
            lengths = torch.tensor([len(ids) for _, ids, _, _ in self._penalised])
            repetition, frequency, presence = strengths.repeat_interleave(lengths, dim=0).to(logits.device).unbind(1)
            counts = counts.to(logits.device)
            values = logits[rows, ids]
            values = torch.where(values > 0, values / repetition, values * repetition)
            logits[rows, ids] = values - frequency * counts - presence * (counts > 0)


def _places(parts: list[tuple[int, npt.NDArray[np.int64]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the token of each value to change, `[m]` each."""
    rows = np.repeat([row for row, _ in parts], [len(ids) for _, ids in parts])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate([ids for _, ids in parts])).to(device)
