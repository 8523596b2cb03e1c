"""Root-mean-square norms as one operation each, in place of the six or seven that transformers' modules are.

A decode step of a small model runs a hundred norms on a handful of rows: each operation costs its call, not its work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FusedRMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._shape = tuple(weight.shape)
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self._shape, self.weight, self._epsilon)


def fuse_norms(module: nn.Module) -> int:
    """Replace every float32 RMS norm below `module` that proves equal to the fused form; return their number."""
    count = 0
    for name, child in module.named_children():
        fused = _fused(child) if type(child).__name__.endswith("RMSNorm") else None
        if fused is not None:
            setattr(module, name, fused)
            count += 1
        else:
            count += fuse_norms(child)
    return count


def _fused(norm: nn.Module) -> FusedRMSNorm | None:
    """The fused form of a norm, or None where no reading of its weight gives the same results.

    Architectures differ in whether the weight is the factor or the factor less one, and in what they call the
    epsilon; trying each on random rows is surer than knowing the names.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != torch.float32 or weight.ndim != 1:
        return None
    epsilons = [value for name in ("eps", "variance_epsilon") if isinstance(value := getattr(norm, name, None), float)]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((4, len(weight)), generator=generator).to(weight.device)
    rows *= torch.tensor([1.0, 1e-3, 1e-6, 10.0], device=rows.device)[:, None]  # small rows show a wrong epsilon
    with torch.inference_mode():
        wanted = norm(rows)
        for epsilon in epsilons:
            for factor in (weight, weight + 1.0):
                fused = FusedRMSNorm(factor.detach().clone(), epsilon)
                if torch.allclose(fused(rows), wanted, rtol=1e-5, atol=1e-7):
                    return fused
    return None
