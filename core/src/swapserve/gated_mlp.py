"""Gated feed-forward layers as three products, with the activation and the gating done inside two of them.

oneDNN applies an activation, or a product with another tensor, to each tile of a product while it is still in the
processor's cache: the intermediate values, the largest of a layer, are written once in place of three times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swapserve.linear import PackedLinear

ACTIVATIONS = (("gelu", "tanh"), ("gelu", "none"), ("swish", ""), ("relu", ""))
"""oneDNN's names for what an architecture may use."""


class FusedGatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` on packed weights."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: tuple[str, str]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gated = self.gate_proj.activated(x, *self._activation)
        product: Tensor = self.down_proj(self.up_proj.multiplied(x, gated))
        return product


def fuse_gated_mlps(module: nn.Module) -> int:
    """Replace every gated feed-forward layer below `module` that proves equal to a fused one; return their number."""
    count = 0
    for name, child in module.named_children():
        fused = _fused(child)
        if fused is not None:
            setattr(module, name, fused)
            count += 1
        else:
            count += fuse_gated_mlps(child)
    return count


def _fused(mlp: nn.Module) -> FusedGatedMLP | None:
    """The fused form of a layer with `gate_proj`, `up_proj` and `down_proj`; None where no activation fits."""
    parts = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    packed = [part for part in parts if isinstance(part, PackedLinear) and part.is_whole]
    if len(packed) != 3 or isinstance(mlp, FusedGatedMLP):
        return None
    gate, up, down = packed
    rows = torch.randn((2, gate.in_features), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = mlp(rows)
        for activation in ACTIVATIONS:
            fused = FusedGatedMLP(gate, up, down, activation)
            if torch.allclose(fused(rows), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max())):
                return fused
    return None
