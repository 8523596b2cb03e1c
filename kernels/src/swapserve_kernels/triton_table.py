"""Which tile sizes the attention kernel is launched with: a table, so that the set of compiled variants is known."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256
FEW_ROWS = 64
"""Up to so many rows (queries × heads of a group) of the longest slice, a tile holds them all: "few"; else "many"."""
SPLIT_KEYS = 256
"""A split of the keys has at least so many, or merging costs more than it saves."""


@dataclass(frozen=True)
class Variant:
    """BLOCK_M rows by BLOCK_N keys a tile, and the compiler's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, head size up to, phase, bytes an element) → rows (for "few": the most), keys, warps, stages.
TABLE: dict[tuple[str, int, str, int], tuple[int, int, int, int]] = {
    ("sm_80", 64, "few", 2): (32, 64, 4, 2),
    ("sm_80", 64, "many", 2): (128, 64, 8, 2),
    ("sm_80", 128, "few", 2): (32, 64, 4, 2),
    ("sm_80", 128, "many", 2): (128, 64, 8, 2),
    ("sm_80", 256, "few", 2): (32, 32, 8, 2),
    ("sm_80", 256, "many", 2): (64, 32, 8, 1),
    ("sm_80", 64, "few", 4): (32, 32, 8, 1),
    ("sm_80", 64, "many", 4): (32, 32, 8, 1),
    ("sm_80", 128, "few", 4): (32, 32, 8, 1),
    ("sm_80", 128, "many", 4): (32, 32, 8, 1),
    ("sm_80", 256, "few", 4): (32, 32, 8, 1),
    ("sm_80", 256, "many", 4): (32, 32, 8, 1),
    ("sm_90", 64, "few", 2): (64, 64, 4, 3),
    ("sm_90", 64, "many", 2): (128, 64, 8, 3),
    ("sm_90", 128, "few", 2): (64, 64, 4, 3),
    ("sm_90", 128, "many", 2): (128, 64, 8, 2),
    ("sm_90", 256, "few", 2): (64, 64, 8, 2),
    ("sm_90", 256, "many", 2): (64, 64, 8, 2),
    ("sm_90", 64, "few", 4): (32, 32, 4, 1),
    ("sm_90", 64, "many", 4): (32, 32, 4, 1),
    ("sm_90", 128, "few", 4): (32, 32, 8, 1),
    ("sm_90", 128, "many", 4): (32, 32, 8, 1),
    ("sm_90", 256, "few", 4): (32, 32, 8, 1),
    ("sm_90", 256, "many", 4): (32, 32, 8, 1),
}


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def architecture(major: int, hip: bool) -> str:
    """The table's name for a GPU of compute capability `major`; what has no rows of its own takes those of sm_80."""
    return "sm_90" if major >= 9 and not hip else "sm_80"


def choose_variant(arch: str, head_dim: int, group: int, max_q: int, itemsize: int) -> Variant:
    """The tile sizes for slices of up to `max_q` queries; "interpreter" has coarse ones: a program is what costs."""
    rows = max(16, next_power_of_two(group))
    if arch == "interpreter":
        return Variant(max(rows, 64 if max_q * group > 16 else 16), 64, 4, 1)
    phase = "few" if max_q * group <= FEW_ROWS else "many"
    bucket = max(64, next_power_of_two(head_dim))
    block_m, block_n, num_warps, num_stages = TABLE[arch, bucket, phase, itemsize]
    if phase == "few":
        block_m = min(block_m, next_power_of_two(max_q * group))
    return Variant(max(block_m, rows), block_n, num_warps, num_stages)


def choose_splits(num_tiles: int, num_kv_heads: int, max_keys: int, block_m: int, num_processors: int) -> int:
    """Into how many parts the keys are split so that every processor has work; host numbers alone decide.

    Small tiles wait for memory most of the time, so several of them should be on a processor at once.
    """
    wanted = num_processors * (4 if block_m <= 32 else 1)
    return max(1, min(wanted // (num_tiles * num_kv_heads), max_keys // SPLIT_KEYS))
