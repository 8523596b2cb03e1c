"""Sampling from the most likely tokens only: min_p, top_k and top_p, without sorting the vocabulary.

All three keep a leading part of the tokens sorted by logit. So it is enough to find a *cutoff* that everything kept
is sure to reach, to gather the few tokens above it, and to sort those. The answer is that of sorting everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swapserve.sampling.history import Profile
from swapserve.sampling.wide import NOT_A_NUMBER, chosen_rows, in_chunks

GUESSED_CHUNKS = 64
"""For top_p alone: at first only tokens above this many chunks' maxima are looked at, which is nearly always enough."""
_SLACK = 1e-3
"""A cutoff computed in float32 is lowered by this share of itself, far more than its rounding; what counts is
decided exactly, in float64, on the tokens above it."""


@dataclass(slots=True)
class Candidates:
    """The tokens that may be drawn of each row, most likely first; of equally likely ones the lowest id first.

    ids: `[n, m]`. weights, cumulative: float64 `[n, m]`, not normalised. kept: `[n]`, how many of a row's are real.
    """

    ids: Tensor
    weights: Tensor
    cumulative: Tensor
    kept: Tensor

    def draw(self, uniform: Tensor) -> Tensor:
        """One token a row, by inverting the cumulative weights at `uniform` `[n]`; see `wide.draw`."""
        total = self._total()
        index = (
            (self.cumulative <= (uniform * total).unsqueeze(1)).sum(-1, keepdim=True).clamp_(max=self.ids.shape[1] - 1)
        )
        return torch.where(total.isfinite() & (total > 0), self.ids.gather(1, index).squeeze(1), NOT_A_NUMBER)

    def dense(self, vocab_size: int) -> Tensor:
        """The probability of every token: float32 `[n, vocab]`."""
        real = torch.arange(self.ids.shape[1], device=self.ids.device) < self.kept.unsqueeze(1)
        shares = torch.where(real, self.weights / self._total().unsqueeze(1), 0.0).float()
        # Places past `kept` hold id 0 or a token cut off: adding nothing there is harmless, writing would not be.
        return torch.zeros(self.ids.shape[0], vocab_size, device=self.ids.device).scatter_add_(1, self.ids, shares)

    def _total(self) -> Tensor:
        return self.cumulative.gather(1, (self.kept - 1).unsqueeze(1)).squeeze(1)


def tokens_above(logits: Tensor, maxima: Tensor, cutoff: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens whose logit is at least `cutoff` `[n]`, sorted: (ids, logits, count), `[n, m]`, `[n, m]` and `[n]`.

    Highest logit first, then lowest id. Rows with fewer than the longest are filled up with minus infinity.
    """
    row, chunk = (maxima >= cutoff.unsqueeze(1)).nonzero(as_tuple=True)
    values = in_chunks(logits, width)[row, chunk]
    hit, place = (values >= cutoff[row].unsqueeze(1)).nonzero(as_tuple=True)
    row, found = row[hit], chunk[hit] * width + place
    count = torch.bincount(row, minlength=logits.shape[0])
    column = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    shape = (logits.shape[0], max(1, int(count.max())))
    ids = torch.zeros(shape, dtype=torch.int64, device=row.device)
    ids[row, column] = found
    padded = torch.full(shape, -torch.inf, device=row.device)
    padded[row, column] = values[hit, place]
    padded, order = padded.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), padded, count


def top_tokens(logits: Tensor, maxima: Tensor, most: int, width: int) -> tuple[Tensor, Tensor]:
    """The `most` tokens with the highest logits, `[n, most]` each: (ids, logits); of equal ones the lowest ids."""
    wanted = torch.full((logits.shape[0],), most, device=logits.device)
    ids, values, _ = tokens_above(logits, maxima, _top_k_cutoff(logits, maxima, wanted), width)
    return ids[:, :most], values[:, :most]


def truncate(logits: Tensor, maxima: Tensor, profiles: Sequence[Profile], width: int) -> Candidates:
    """Apply temperature, then min_p, top_k and top_p, to rows of logits `[n, vocab]`.

    min_p keeps tokens at least that share as likely as the likeliest; top_k the k likeliest and all that equal the
    last of them; top_p the fewest whose share of what is left reaches p. At least one token is always kept.
    `maxima` is `chunk_maxima(logits, width)`; `profiles` has one for each row.
    """
    vocab_size = logits.shape[1]
    asked = [(p.params.temperature, p.top_k, p.params.top_p, p.params.min_p) for p in profiles]
    settings = torch.tensor(asked, dtype=torch.float64, device=logits.device)
    temperature, top_k, top_p, min_p = settings.unbind(1)
    peak = maxima.amax(-1).double()
    total = torch.full_like(peak, torch.nan)
    cutoff = torch.maximum(_top_k_cutoff(logits, maxima, top_k), _share_cutoff(peak, temperature, min_p))
    only_top_p = [i for i, (_, k, _, share) in enumerate(asked) if k == vocab_size and not share]
    if only_top_p:
        rows = torch.tensor(only_top_p, device=logits.device)
        total[rows] = _total_weight(chosen_rows(logits, only_top_p), peak[rows], temperature[rows], width)
        cutoff[rows] = _nth_maximum(maxima[rows], GUESSED_CHUNKS)
    settings = torch.cat([settings, peak.unsqueeze(1), total.unsqueeze(1)], 1)
    candidates = _keep(logits, maxima, cutoff, settings, width)
    if only_top_p:
        sure = _share_cutoff(peak, temperature, (1 - top_p) * total / vocab_size)
        for cutoff in (maxima.amin(-1), sure):
            short = (candidates.cumulative[:, -1] < top_p * total).nonzero().squeeze(1)
            if not len(short):
                break
            rows_left = (logits[short], maxima[short], cutoff[short], settings[short])
            candidates = _replaced(candidates, short, _keep(*rows_left, width))
    return candidates


def _keep(logits: Tensor, maxima: Tensor, cutoff: Tensor, settings: Tensor, width: int) -> Candidates:
    """The tokens at or above `cutoff` that min_p, top_k and top_p keep.

    settings: float64 `[n, 6]`: temperature, top_k, top_p, min_p, the highest logit, and the weight of the whole
    row, where it is known (NaN: that of what min_p and top_k keep).
    """
    ids, values, count = tokens_above(logits, maxima, cutoff, width)
    temperature, top_k, top_p, min_p, peak, total = settings.unsqueeze(2).unbind(1)
    weights = ((values.double() - peak) / temperature).exp()
    cumulative = weights.cumsum(-1)

    def cut(kept: Tensor, stays: Tensor) -> Tensor:
        return torch.minimum(kept, stays.sum(-1, keepdim=True)).clamp_(min=1)

    kept = cut(count.unsqueeze(1), weights >= min_p)
    kept = cut(kept, values >= values.gather(1, torch.minimum(top_k.long(), kept) - 1))
    total = torch.where(total.isnan(), cumulative.gather(1, kept - 1), total)
    before = torch.nn.functional.pad(cumulative, (1, 0))[:, :-1]
    kept = cut(kept, before < top_p * total)
    return Candidates(ids, weights, cumulative, kept.squeeze(1))


def _replaced(candidates: Candidates, rows: Tensor, new: Candidates) -> Candidates:
    """`candidates` with some rows replaced by those of `new`; the narrower is filled up with its last column."""
    width = max(candidates.ids.shape[1], new.ids.shape[1])

    def merged(old: Tensor, newer: Tensor) -> Tensor:
        return _filled(old, width).index_copy(0, rows, _filled(newer, width))

    return Candidates(
        merged(candidates.ids, new.ids),
        merged(candidates.weights, new.weights),
        merged(candidates.cumulative, new.cumulative),
        candidates.kept.index_copy(0, rows, new.kept),
    )


def _filled(rows: Tensor, width: int) -> Tensor:
    return torch.cat([rows, rows[:, -1:].expand(-1, width - rows.shape[1])], 1)


def _nth_maximum(maxima: Tensor, n: int) -> Tensor:
    """The n-th largest chunk maximum of each row (the least, where there are fewer): at least n tokens reach it."""
    return maxima.sort(-1, descending=True).values[:, min(n, maxima.shape[1]) - 1]


def _top_k_cutoff(logits: Tensor, maxima: Tensor, top_k: Tensor) -> Tensor:
    """A logit that each row's `top_k` likeliest tokens reach, `[n]`; minus infinity where that is all of them."""
    vocab_size, num_chunks = logits.shape[1], maxima.shape[1]
    top_k = top_k.long()
    ranked = maxima.sort(-1, descending=True).values
    cutoff = ranked.gather(1, top_k.clamp(max=num_chunks).unsqueeze(1) - 1).squeeze(1)
    cutoff = torch.where(top_k < vocab_size, cutoff, -torch.inf)
    many = ((top_k > num_chunks) & (top_k < vocab_size)).nonzero().squeeze(1)
    if len(many):
        highest = logits[many].topk(int(top_k[many].max())).values
        cutoff[many] = highest.gather(1, top_k[many].unsqueeze(1) - 1).squeeze(1)
    return cutoff


def _share_cutoff(peak: Tensor, temperature: Tensor, share: Tensor) -> Tensor:
    """A float32 logit that every token at least `share` times as likely as the likeliest reaches, `[n]`."""
    depth = -temperature * share.log()
    return (peak - depth - _SLACK * (peak.abs() + depth.abs())).float()


def _total_weight(logits: Tensor, peak: Tensor, temperature: Tensor, width: int) -> Tensor:
    """The sum over all tokens of exp((logit - peak) / temperature), float64 `[n]`."""
    weights = (logits - peak.float().unsqueeze(1)).div_(temperature.float().unsqueeze(1)).exp_()
    return in_chunks(weights, width).sum(-1).double().sum(-1)
