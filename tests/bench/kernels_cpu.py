"""Times attention on the CPU against torch's own on contiguous memory, and against reading the keys once.

    python tests/bench/kernels_cpu.py [--threads 2] [--only decode] [--dtype float32]

`x read` is the time over that of reading the keys and values once at the speed measured here, `x sdpa` over that of
`scaled_dot_product_attention` on the same keys laid side by side, one call a sequence, masks made beforehand. The
three are timed in turn, so that a busy machine slows all of them; each row is checked before it is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from swapserve_kernels import AttnBatch, get_backend


@dataclass(frozen=True)
class Work:
    """`spans` are (queries, keys) of each sequence, `heads` are (query, KV)."""

    name: str
    spans: list[tuple[int, int]]
    heads: tuple[int, int]
    dim: int
    window: int = 0


GEMMA, LLAMA, QWEN = ((4, 1), 256), ((32, 8), 128), ((14, 2), 64)
RAGGED = [(1, length) for length in range(32, 993, 64)]
WORKS = [
    Work("decode 16 x 512", [(1, 512)] * 16, *GEMMA),
    Work("decode ragged 32..992", RAGGED, *GEMMA),
    Work("decode ragged, window 512", RAGGED, *GEMMA, window=512),
    Work("decode 4 x 64", [(1, 64)] * 4, *GEMMA),
    Work("decode 1 x 512", [(1, 512)], *GEMMA),
    Work("decode 1 x 4096", [(1, 4096)], *GEMMA),
    Work("decode 16 x 512", [(1, 512)] * 16, *LLAMA),
    Work("decode ragged 32..992", RAGGED, *LLAMA),
    Work("decode 16 x 512", [(1, 512)] * 16, *QWEN),
    Work("verify 8 x 5 of 512", [(5, 512)] * 8, *GEMMA),
    Work("verify 8 x 5 of 512", [(5, 512)] * 8, *QWEN),
    Work("prompt 4 x 24", [(24, 24)] * 4, *GEMMA),
    Work("prompt 128", [(128, 128)], *GEMMA),
    Work("prompt 512", [(512, 512)], *GEMMA),
    Work("prompt 1500", [(1500, 1500)], *GEMMA),
    Work("prompt 1500, window 512", [(1500, 1500)], *GEMMA, window=512),
    Work("piece 256 of 2048, window 512", [(256, 2048)], *GEMMA, window=512),
    Work("mixed: 12 decodes, prompt 256", [(1, 512)] * 12 + [(256, 256)], *GEMMA),
    Work("prompt 512", [(512, 512)], *LLAMA),
    Work("prompt 512", [(512, 512)], *QWEN),
]


class Setting:
    """The tensors of a work in both layouts, filled with the same numbers."""

    def __init__(self, work: Work, page: int, dtype: torch.dtype) -> None:
        self.work = work
        num_heads, num_kv_heads = work.heads
        needed = [-(-length // page) for _, length in work.spans]
        order = (torch.randperm(sum(needed)) + 1).tolist()
        self.kernels = get_backend("cpu", "cpu")
        self.kernels.prepare(num_heads, num_kv_heads, work.dim, dtype)
        self.kv = self.kernels.allocate(sum(needed) + 1, page, num_kv_heads, work.dim, dtype, "cpu")
        self.runs: list[tuple[Tensor, Tensor]] = []
        table = torch.zeros(len(work.spans), max(needed), dtype=torch.int32)
        for sequence, (_, length) in enumerate(work.spans):
            for index in range(needed[sequence]):
                table[sequence, index] = order.pop()
            slots = torch.arange(length)
            slots = table[sequence, slots // page].long() * page + slots % page
            run = [torch.randn(length, num_kv_heads, work.dim).to(dtype) for _ in range(2)]
            self.kernels.write_kv(*run, self.kv, slots)
            self.runs.append((run[0].transpose(0, 1).contiguous(), run[1].transpose(0, 1).contiguous()))
        counts = [count for count, _ in work.spans]
        self.batch = AttnBatch(
            cu_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            kv_len=torch.tensor([length for _, length in work.spans], dtype=torch.int32),
            block_table=table,
            slots=torch.full((sum(counts),), -1),
            tree_mask=None,
            max_q=max(counts),
            max_kv=max(length for _, length in work.spans),
        )
        self.q = torch.randn(sum(counts), num_heads, work.dim).to(dtype)
        self.masks = [self._mask(count, length) for count, length in work.spans]

    def _mask(self, count: int, length: int) -> Tensor | None:
        if count == 1 and not 0 < self.work.window < length:
            return None
        position, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        return (key <= position) & (key > position - (self.work.window or length))

    def ours(self) -> Tensor:
        return self.kernels.attention_varlen(
            self.q, self.kv, self.batch, sm_scale=self.work.dim**-0.5, window=self.work.window
        )

    def torchs(self) -> Tensor:
        """One call a sequence; a decode folds its group into the query axis, so that each key is read once."""
        (num_heads, num_kv_heads), dim = self.work.heads, self.work.dim
        made, row = torch.empty_like(self.q), 0
        for (count, _), (k, v), mask in zip(self.work.spans, self.runs, self.masks, strict=True):
            q = self.q[row : row + count]
            if count == 1:
                folded = q.view(num_kv_heads, num_heads // num_kv_heads, dim)
                made[row] = scaled_dot_product_attention(folded[None], k[None], v[None], mask)[0].view(num_heads, dim)
            else:
                q = q.transpose(0, 1)[None]
                answer = scaled_dot_product_attention(q, k[None], v[None], mask, enable_gqa=True)
                made[row : row + count] = answer[0].transpose(0, 1)
            row += count
        return made

    def bytes_read(self) -> int:
        """Keys and values that must be read at least once."""
        window, each = self.work.window, 2 * self.work.heads[1] * self.work.dim * self.kv.k.element_size()
        return sum(min(length, window + count - 1 if window else length) for count, length in self.work.spans) * each


def milliseconds(arms: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[float]:
    """The least time of each arm, taken in turn for about so many seconds: what others do to the machine only adds."""
    times: list[list[float]] = [[] for _ in arms]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 5:
        for arm, kept in zip(arms, times, strict=True):
            start = clock()
            arm()
            kept.append(clock() - start)
    return [min(kept) * 1e3 for kept in times]


def report(work: Work, page: int, dtype: torch.dtype, seconds: float, clock: Callable[[], float]) -> str:
    setting = Setting(work, page, dtype)
    error = (setting.ours().float() - setting.torchs().float()).abs().max().item()
    if not error <= (1e-5 if dtype == torch.float32 else 3e-2):
        raise SystemExit(f"{work.name}: the answers differ by {error:.2g}; no time is taken of a wrong answer")
    size = setting.bytes_read()
    memory = torch.zeros(max(size // 4, 1))
    ours, torchs, read = milliseconds([setting.ours, setting.torchs, memory.sum], seconds, clock)
    shape = f"{work.heads[0]}/{work.heads[1]}x{work.dim}"
    return (
        f"{work.name:30} {shape:10} {ours:9.3f} {torchs:9.3f} {read:9.3f} {ours / torchs:8.2f} {ours / read:8.2f}"
        f" {error:9.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="works whose name holds this")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--cpu-time", action="store_true", help="for one thread on a busy machine")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each work")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    unit = "milliseconds of CPU time" if chosen.cpu_time else "milliseconds"
    print(f"threads {chosen.threads}, page {chosen.page}, {chosen.dtype}, {unit} (least of many)")
    print(f"{'work':30} {'heads':10} {'ours':>9} {'sdpa':>9} {'read':>9} {'x sdpa':>8} {'x read':>8} {'error':>9}")
    for work in WORKS:
        if chosen.only in work.name:
            print(report(work, chosen.page, getattr(torch, chosen.dtype), chosen.seconds, clock), flush=True)


if __name__ == "__main__":
    main()
