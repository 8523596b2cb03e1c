"""Packed products and fused norms are the same numbers, and memory that is dropped loses nothing."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from torch import nn

from swapserve import linear
from swapserve.gated_mlp import fuse_gated_mlps
from swapserve.linear import PackedLinear, pack_linears, packing_available, release_pages
from swapserve.norms import FusedRMSNorm, fuse_norms

needs_packing = pytest.mark.skipif(not packing_available(), reason="this torch has no packed products")


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (16, 24), (1, 5, 24), (300, 24)])
@pytest.mark.parametrize("chunk", [1000, 32, 7])
def test_packed_equals_plain(bias, shape, chunk, monkeypatch):
    monkeypatch.setattr(linear, "HEAD_CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    plain, x = nn.Linear(24, 50, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain.weight, plain.bias)(x), plain(x), rtol=1e-5, atol=1e-5)


@needs_packing
def test_only_float32_on_a_cpu_is_packed():
    tree = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert pack_linears(tree) == 2
    assert [type(tree[0]), type(tree[1][0]), type(tree[2])] == [PackedLinear, PackedLinear, nn.Linear]


def test_pages_of_a_file_are_dropped_and_come_back(tmp_path):
    size = 64 * mmap.PAGESIZE
    values = np.arange(size // 4, dtype=np.float32)
    path = tmp_path / "weights"
    path.write_bytes(values.tobytes())
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        tensor = torch.frombuffer(mapped, dtype=torch.float32)
        total = float(tensor.sum())
        assert release_pages(tensor)
        assert float(tensor.sum()) == total
        del tensor


def test_memory_that_is_no_files_is_left_alone():
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    assert not release_pages(tensor)
    assert float(tensor[-1]) == (1 << 20) - 1


class OffsetRMSNorm(nn.Module):
    """Gemma's way: the weight is the factor less one."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(16)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class StrangeRMSNorm(OffsetRMSNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_norms_that_prove_equal_are_fused_and_others_are_left():
    torch.manual_seed(0)
    tree = nn.ModuleDict({"a": OffsetRMSNorm(1e-6), "b": nn.Sequential(OffsetRMSNorm(1e-5)), "c": StrangeRMSNorm(1e-6)})
    x = torch.randn(3, 5, 16)
    with torch.inference_mode():
        wanted = [tree["a"](x), tree["b"](x)]
        assert fuse_norms(tree) == 2
        assert isinstance(tree["a"], FusedRMSNorm) and isinstance(tree["c"], StrangeRMSNorm)
        torch.testing.assert_close([tree["a"](x), tree["b"](x)], wanted)


class GatedMLP(nn.Module):
    def __init__(self, activation, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
        self.down_proj, self.activation = nn.Linear(40, 24, bias=bias), activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@needs_packing
@pytest.mark.parametrize("activation", [nn.GELU("tanh"), nn.GELU(), nn.SiLU(), nn.ReLU()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gated_layers_that_prove_equal_are_fused(activation, bias):
    torch.manual_seed(0)
    tree, x = nn.Sequential(GatedMLP(activation, bias)), torch.randn(1, 5, 24)
    with torch.inference_mode():
        wanted = tree(x)
        pack_linears(tree)
        assert fuse_gated_mlps(tree) == 1
        torch.testing.assert_close(tree(x), wanted, rtol=1e-5, atol=1e-5)
        assert fuse_gated_mlps(tree) == 0


@needs_packing
def test_a_gated_layer_with_another_activation_is_left():
    tree = nn.Sequential(GatedMLP(torch.tanh))
    pack_linears(tree)
    assert fuse_gated_mlps(tree) == 0 and isinstance(tree[0], GatedMLP)
