"""Products with weights laid out once for the processor: oneDNN's packed form for float32 on a CPU.

A decode step multiplies a few rows with every weight there is. `F.linear` lays the weights out anew in each call,
which costs two to three times the product; packed once, it runs near the speed of memory. The plain copy is
let go of: weights that are mapped from a file give their memory back even while the file stays mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor, nn

PACKED_FOR_ROWS = 16
"""The number of rows oneDNN is told to expect; its layout for 16 measured best from 1 to 1,024 rows."""
HEAD_CHUNK_ROWS = 32_768
"""Rows of a large matrix that are packed at a time, so that its plain and packed form never both fill memory."""
_MADV_DONTNEED = 4


def packing_available() -> bool:
    """Whether this torch has oneDNN's packed products."""
    mkldnn = torch.backends.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    built_in: bool = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built_in and all(hasattr(torch.ops.mkldnn, name) for name in names)


class PackedLinear(nn.Module):
    """`nn.Linear` on weights packed by oneDNN; the same product up to rounding. Float32, CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        pieces = []
        for piece in torch.split(weight.detach(), HEAD_CHUNK_ROWS):
            pieces.append(torch.ops.mkldnn._reorder_linear_weight(piece, PACKED_FOR_ROWS))
            release_pages(piece)
        self._pieces = pieces

    @property
    def is_whole(self) -> bool:
        """Whether the weights are packed in one piece, as all but very tall ones are."""
        return len(self._pieces) == 1

    def activated(self, x: Tensor, activation: str, variant: str) -> Tensor:
        """`activation` of the product, by oneDNN's names; only where `is_whole`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._pieces[0], self.bias, activation, [], variant)
        return product

    def multiplied(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`, element by element; only where `is_whole`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._pieces[0], self.bias, "mul")
        return product

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_features]` to `[..., out_features]`."""
        if self.is_whole:
            return self.activated(x, "none", "")
        multiply = torch.ops.mkldnn._linear_pointwise
        rows = x.reshape(-1, self.in_features)
        out = x.new_empty(rows.shape[0], self.out_features)
        begin = 0
        for piece in self._pieces:
            end = min(begin + HEAD_CHUNK_ROWS, self.out_features)
            out[:, begin:end] = multiply(rows, piece, None, "none", [], "")
            begin = end
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


def pack_linears(module: nn.Module) -> int:
    """Replace every float32 `nn.Linear` below `module` by its packed form; return how many there were."""
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
            setattr(module, name, PackedLinear(child.weight, child.bias))
            count += 1
        else:
            count += pack_linears(child)
    return count


def release_pages(tensor: Tensor) -> bool:
    """Give back the memory of a tensor that is mapped from a file and unchanged; it is read again when touched.

    False, and nothing done, for any other tensor and on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return False
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin or not _mapped_from_file(begin, end):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)) == 0


def _mapped_from_file(begin: int, end: int) -> bool:
    """Whether one mapping of a file holds all of [begin, end): then, and only then, dropping pages loses nothing."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode = line.split(maxsplit=5)[:5]
            low, high = (int(bound, 16) for bound in span.split("-"))
            if low <= begin < high:
                return end <= high and inode != "0"
    return False


def return_free_memory() -> None:
    """Give memory that was freed back to the system, which glibc otherwise keeps; nothing on other systems."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
