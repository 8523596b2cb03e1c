"""Exact verification of drafts that come with the probabilities they were drawn from.

Speculative sampling (Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023;
Chen et al.: "Accelerating Large Language Model Decoding with Speculative Sampling", 2023): a token x drawn from q is
accepted with probability min(1, p(x) / q(x)); a rejected one is replaced by a draw from the residual. What comes out
is distributed as p, whatever q is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swapserve.sampling.wide import draw


def residual(target: Tensor, proposed: Tensor) -> Tensor:
    """What of the target's distribution the proposal leaves uncovered, max(p - q, 0), not normalised: `[n, vocab]`.

    Where rounding leaves nothing the two are equal, and the target's own distribution is as good.
    """
    uncovered = (target - proposed).clamp_(min=0)
    return torch.where(uncovered.sum(-1, keepdim=True) > 0, uncovered, target)


def verify(
    target: Tensor, proposed: Tensor, tokens: Tensor, accept_uniform: Tensor, residual_uniform: Tensor, width: int
) -> Tensor:
    """The draft token of each row where it is accepted, else its replacement: `[n]`.

    target, proposed: the distributions p and q, `[n, vocab]`, p as it is sampled from (temperature, top_k and the
    rest applied). tokens: `[n]`, drawn from q. The uniforms `[n]` are independent of each other and of that draw.
    """
    index = tokens.unsqueeze(1)
    likely, offered = target.gather(1, index).squeeze(1).double(), proposed.gather(1, index).squeeze(1).double()
    accepted = accept_uniform * offered < likely
    return torch.where(accepted, tokens, draw(residual(target, proposed), residual_uniform, width))
