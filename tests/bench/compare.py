"""Our engine against transformers on three workloads, in one process: same tokens first, then times and ratios.

    SWAPSERVE_CACHE=… python tests/bench/compare.py --write tests/bench/RESULTS.md

Without --model it runs on the demo model. GOMP_SPINCOUNT=50000 in the environment is what the server sets for itself.
On a machine that others use, compare CPU seconds under --threads 1: those hardly feel them. Arms take turns within
a repetition, so that a slow minute of the machine hits all of them; figures are medians over repetitions.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from arms import Arm, ContinuousArm, EngineArm, Served, StaticArm, load_transformers
from breakdown import timed_parts
from report import machine, write_report
from transformers import PreTrainedModel
from workloads import WORKLOADS, Job, Workload

from swapserve.demo import demo_model_path
from swapserve.model import LoadedModel, load_model

DEFAULT_ARMS = (
    "scheduler=chunked kv=paged speculator=none",
    "scheduler=chunked kv=prefix speculator=none",
    "scheduler=continuous kv=paged speculator=none",
    "scheduler=static kv=contiguous speculator=none",
)
NEAR_TIE = 0.01
"""Two logits this close may change places by rounding: products are summed in another order in each engine."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    source = args.model or str(demo_model_path(print))
    begin = time.perf_counter()
    model = load_model(source, device="cpu", progress=print)
    print(f"loaded in {time.perf_counter() - begin:.1f} s, attention kernels: {model.kernels.name}", flush=True)
    arms: list[Arm] = [EngineArm(model, policies) for policies in args.arm or DEFAULT_ARMS]
    plain = load_transformers(model.source)
    if not args.ours_only:
        arms += [StaticArm(plain), ContinuousArm(plain)]
    try:
        warm_up = Workload((Job(WORKLOADS["w3"](99, 0).jobs[0].prompt[:16], 4),), 1)
        for arm in arms:
            arm.serve(warm_up)
        rows = []
        for key in args.workloads.split(","):
            rows += measure(key, arms, args.reps if key != "w1" else args.w1_reps, plain)
            for row in rows[-len(arms) :]:
                print(json.dumps(row), flush=True)
        parts = {key: where_time_goes(arms, key, model) for key in args.workloads.split(",")}
        for key, by_part in parts.items():
            print(key, {part: round(value, 2) for part, value in by_part.items()}, flush=True)
    finally:
        for arm in arms:
            arm.close()
    if args.write:
        write_report(Path(args.write), rows, parts, machine(args.threads), " ".join(["python", *sys.argv]))


def measure(key: str, arms: Sequence[Arm], repetitions: int, judge: PreTrainedModel) -> list[dict[str, object]]:
    """One row an arm for a workload; ends the run when two arms give tokens that rounding cannot explain."""
    times: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    verdicts: dict[str, str] = {}
    for repetition in range(repetitions):
        workload = WORKLOADS[key](0, repetition)
        answers: dict[str, Sequence[Served]] = {}
        for arm in arms if repetition % 2 == 0 else list(reversed(arms)):
            begin, cpu = time.perf_counter(), time.process_time()
            answers[arm.name] = arm.serve(workload)
            wall = time.perf_counter() - begin
            times[arm.name].append(_times(workload, answers[arm.name], wall, time.process_time() - cpu))
            print(f"{key} {repetition} {arm.name}: {wall:.2f} s", flush=True)
        if repetition == 0:
            verdicts = {arm.name: _compare(workload, answers[arms[0].name], answers[arm.name], judge) for arm in arms}
            print(key, verdicts, flush=True)
    rows: list[dict[str, object]] = []
    for arm in arms:
        runs = times[arm.name]
        medians = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
        rows.append(
            {"workload": key, "arm": arm.name, "repetitions": repetitions, **medians, "tokens": verdicts[arm.name]}
        )
    return rows


def _times(workload: Workload, answers: Sequence[Served], wall: float, cpu: float) -> dict[str, float]:
    gaps = [(answer.last - answer.first) / (len(answer.tokens) - 1) for answer in answers if len(answer.tokens) > 1]
    return {
        "wall_s": wall,
        "tokens_per_s": workload.num_new / wall,
        "mean_ttft_s": statistics.fmean(answer.first for answer in answers),
        "mean_tpot_s": statistics.fmean(gaps),
        "cpu_s": cpu,
    }


def _compare(workload: Workload, ours: Sequence[Served], theirs: Sequence[Served], judge: PreTrainedModel) -> str:
    """How the tokens of two arms compare; `SystemExit` where they differ by more than rounding."""
    ties = 0
    for number, (job, one, other) in enumerate(zip(workload.jobs, ours, theirs, strict=True)):
        if len(one.tokens) != job.num_new or len(other.tokens) != job.num_new:
            raise SystemExit(f"request {number}: {len(one.tokens)} and {len(other.tokens)} tokens, not {job.num_new}")
        if one.tokens == other.tokens:
            continue
        place = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b)
        context = torch.tensor([[*job.prompt, *one.tokens[:place]]])
        with torch.inference_mode():
            logits = judge(context, logits_to_keep=1).logits[0, -1]
        first, second = one.tokens[place], other.tokens[place]
        gap = abs(float(logits[first] - logits[second]))
        if gap > NEAR_TIE:
            raise SystemExit(
                f"request {number}, new token {place}: {first} or {second}, whose logits differ by {gap:.4f}"
            )
        ties += 1
    return f"{len(workload.jobs) - ties} of {len(workload.jobs)} equal" + (
        f", {ties} part at a near tie" if ties else ""
    )


def where_time_goes(arms: Sequence[Arm], key: str, model: LoadedModel) -> dict[str, float]:
    """Milliseconds a step of each part, of the first arm on a workload."""
    with timed_parts(model) as parts:
        arms[0].serve(WORKLOADS[key](0, 100))
    return parts()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or GGUF file; default: the demo model")
    parser.add_argument("--arm", action="append", help="policies of an arm; may be given again")
    parser.add_argument("--workloads", default="w3,w2,w1")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--w1-reps", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours-only", action="store_true", help="leave transformers' arms out")
    parser.add_argument("--write", help="the Markdown file to write the results to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    print(f"peak RSS of the whole run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
