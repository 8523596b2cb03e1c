"""The product on a real model: all 27 combinations give what transformers' own `generate` gives, token for token.

    python tests/product/demo_model.py

Eight prompts of 3 to 1,500 tokens (several past the model's sliding window), 64 greedy tokens each, float32. Where
one differs, the two best logits at the first difference must be closer than rounding can tell apart. The draft
model is the model itself with its last layers left out: right sometimes. Exit code 1 when a combination fails.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from swapserve import Engine, ModelInfo, OpenModel, Plugins, PolicySpec, SamplingParams, hookimpl
from swapserve.build import ChosenPolicy
from swapserve.demo import demo_model_path
from swapserve.executor import TorchExecutor
from swapserve.model import LoadedModel, load_model
from swapserve.report import StepReport
from swapserve.spec import check_options

LENGTHS = (3, 17, 64, 200, 511, 530, 1000, 1500)
NUM_TOKENS = 64
NEAR_TIE = 1e-3
KINDS = {
    "scheduler": ("static", "continuous", "chunked,chunk_size=300"),
    "kv": ("contiguous", "paged", "prefix"),
    "speculator": ("none", "ngram", "draft"),
}


class Counts:
    """Watches the loop: drafts proposed and accepted, steps and preemptions."""

    def __init__(self) -> None:
        self.proposed = self.accepted = self.steps = self.preempted = 0

    @hookimpl
    def swapserve_step_finished(self, report: StepReport) -> None:
        self.proposed += report.drafts_proposed
        self.accepted += report.drafts_accepted
        self.steps += 1
        self.preempted += len(report.preempted)


def make_prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Pieces of this project's own documentation, of the wanted lengths; two begin alike, to be shared."""
    root = Path(__file__).parents[2]
    text = "\n".join(
        path.read_text() for path in (root / "README.md", *sorted((root / "core/src/swapserve").glob("p*.py")))
    )
    ids = tokenizer.encode(text)
    starts = (0, 400, 800, 1200, 0, 2000, 0, 3000)
    return [[ids[0], *ids[1 + start : start + length]] for start, length in zip(starts, LENGTHS, strict=True)]


def reference(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """What transformers' generate says, greedily."""
    made = model.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in made[0, len(prompt) :]]


def shortened(source: str, layers: int, folder: Path) -> str:
    """The model with its first layers only, saved: a draft model with the same vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    config.layer_types = config.layer_types[:layers]
    model.model.layers = model.model.layers[:layers]
    model.config = config
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(folder)
    return str(folder)


def run(
    model: LoadedModel, draft: LoadedModel, texts: Sequence[str], prompts: Sequence[Sequence[int]], plugins: Plugins
) -> tuple[list[list[int]], Counts]:
    """The outputs of one combination, all prompts at once in a pool that is a little too small for all of them."""

    def open_model(name: str) -> OpenModel:
        return OpenModel(info_of(draft), lambda blocks, size: TorchExecutor(draft, blocks, size))

    def info_of(loaded: LoadedModel) -> ModelInfo:
        return ModelInfo(
            loaded.name, loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids,
            max_num_seqs=8, max_num_batched_tokens=2048, open_model=open_model,
        )  # fmt: skip

    info, counts = info_of(model), Counts()
    chosen = []
    for kind, text in zip(KINDS, texts, strict=True):
        spec = PolicySpec.parse(text if text != "draft" else "draft,model=short")
        policy = plugins.policy(kind, spec.name)
        chosen.append(ChosenPolicy(kind, policy, check_options(kind, policy, spec)))
    kv = chosen[1].make(3200)
    watchers = Plugins(found=())
    watchers.register(counts, "counts")
    engine = Engine(
        executor=TorchExecutor(model, kv.num_slots // kv.block_size, kv.block_size),
        scheduler=chosen[0].make(), kv=kv, speculator=chosen[2].make(info), model=info, plugins=watchers.manager,
        seed=0,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    for output in engine.run():
        if output.error:
            raise RuntimeError(output.error)
    return [list(request.output) for request in requests], counts


def gap(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The distance of the two best logits where two continuations part; infinite when they are not the two best."""
    at = next(n for n, pair in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
    best = logits.topk(2)
    if set(best.indices.tolist()) != {ours[at] if at < len(ours) else -1, theirs[at] if at < len(theirs) else -1}:
        return float("inf")
    return float(best.values[0] - best.values[1])


@click.command(help=__doc__)
@click.option("--draft-layers", default=12, help="Layers of the draft model.")
@click.option("--only", default="", help="Only combinations whose names hold this text.")
def main(draft_layers: int, only: str) -> None:
    source = str(demo_model_path(print))
    model = load_model(source, device="cpu")
    prompts = make_prompts(model.tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32)
    expected = [reference(plain, prompt) for prompt in prompts]
    print(
        f"transformers has answered {len(prompts)} prompts of {[len(prompt) for prompt in prompts]} tokens", flush=True
    )
    plugins, failed, ties = Plugins(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        draft = load_model(shortened(model.source, draft_layers, Path(folder)), device="cpu")
        print("| combination | equal | near ties | drafts accepted | preempted | seconds |\n|---|---|---|---|---|---|")
        for texts in product(*KINDS.values()):
            name = " + ".join(texts)
            if only not in name:
                continue
            begin = time.perf_counter()
            outputs, counts = run(model, draft, texts, prompts, plugins)
            parted = [n for n, output in enumerate(outputs) if output != expected[n]]
            gaps = [gap(plain, prompts[n], outputs[n], expected[n]) for n in parted]
            ties += sum(one < NEAR_TIE for one in gaps)
            failed += sum(one >= NEAR_TIE for one in gaps)
            drafts = f"{counts.accepted} of {counts.proposed}" if counts.proposed else "-"
            print(
                f"| {name} | {len(prompts) - len(parted)} of {len(prompts)} | {[f'{one:.1e}' for one in gaps] or '-'} "
                f"| {drafts} | {counts.preempted} | {time.perf_counter() - begin:.1f} |", flush=True,
            )  # fmt: skip
    print(f"{ties} continuations part at a near tie (top-2 gap under {NEAR_TIE}); {failed} part where they may not")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
