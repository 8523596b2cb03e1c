"""What is measured: our engine with given policies, and transformers' two ways to generate for many requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from workloads import Workload

from swapserve.build import choose_policies
from swapserve.config import Settings
from swapserve.engine import Engine
from swapserve.executor import TorchExecutor
from swapserve.model import LoadedModel
from swapserve.params import SamplingParams
from swapserve.plugins import Plugins
from swapserve.policies import ModelInfo

MOST_TOKENS_IN_KV = 16 * (512 + 256)


@dataclass
class Served:
    """What became of one request: its new tokens, and when the first and the last came, in seconds from the start."""

    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0


class Arm(Protocol):
    """One way to serve a workload."""

    name: str

    def serve(self, workload: Workload) -> Sequence[Served]:
        """Serve all requests, greedily, each to exactly its number of new tokens; one answer each, in order."""

    def close(self) -> None:
        """End what the arm keeps running."""


class EngineArm:
    """Our engine. A fresh one for each workload, so that nothing is cached from one to the next."""

    def __init__(self, model: LoadedModel, policies: str, max_num_batched_tokens: int = 2048) -> None:
        self.name = policies
        self.model = model
        self.max_tokens = max_num_batched_tokens
        settings = Settings(**dict(part.split("=", 1) for part in policies.split()))
        self.policies = choose_policies(settings, Plugins())
        self.executor: TorchExecutor | None = None
        self.engine: Engine | None = None

    def _engine(self, max_running: int) -> Engine:
        info = ModelInfo(
            name=self.model.name,
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            max_num_seqs=max_running,
            max_num_batched_tokens=self.max_tokens,
        )
        chosen: dict[str, Any] = {kind: getattr(self.policies, kind) for kind in ("scheduler", "kv", "speculator")}
        kv = chosen["kv"].policy(chosen["kv"].options, MOST_TOKENS_IN_KV)
        self.executor = TorchExecutor(self.model, kv.num_slots // kv.block_size, kv.block_size)
        return Engine(
            executor=self.executor,
            scheduler=chosen["scheduler"].policy(chosen["scheduler"].options),
            kv=kv,
            speculator=chosen["speculator"].policy(chosen["speculator"].options, info),
            model=info,
        )

    def serve(self, workload: Workload) -> Sequence[Served]:
        self.engine = engine = self._engine(workload.max_running)
        begin = time.perf_counter()
        served: dict[str, Served] = {}
        for job in workload.jobs:
            params = SamplingParams(temperature=0.0, max_tokens=job.num_new, ignore_eos=True)
            served[engine.submit(job.prompt, params).id] = Served()
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                answer = served[output.request.id]
                if output.tokens and not answer.tokens:
                    answer.first = now
                answer.tokens.extend(output.tokens)
                answer.last = now
        return list(served.values())

    def close(self) -> None:
        self.engine = self.executor = None


def load_transformers(folder: str) -> PreTrainedModel:
    """The same weights as a plain transformers model that ends at no token of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    return model


class _NoteTimes(LogitsProcessor):
    """Notes when each token's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class StaticArm:
    """`generate` on batches in order of arrival, padded on the left; each runs until its longest request is done."""

    name = "transformers static generate"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def serve(self, workload: Workload) -> Sequence[Served]:
        begin = time.perf_counter()
        served: list[Served] = []
        for low in range(0, len(workload.jobs), workload.max_running):
            jobs = workload.jobs[low : low + workload.max_running]
            width = max(len(job.prompt) for job in jobs)
            padded = torch.tensor([(0,) * (width - len(job.prompt)) + job.prompt for job in jobs])
            mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
            notes = _NoteTimes()
            made = self.model.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=False,
                pad_token_id=0,
                max_new_tokens=max(job.num_new for job in jobs),
                logits_processor=LogitsProcessorList([notes]),
            )[:, width:].tolist()
            for job, tokens in zip(jobs, made, strict=True):
                last = notes.times[job.num_new - 1] - begin
                served.append(Served(tokens[: job.num_new], notes.times[0] - begin, last))
        return served

    def close(self) -> None:
        pass


class ContinuousArm:
    """transformers' own continuous batching, with the settings it did best with."""

    name = "transformers continuous batching"

    def __init__(self, model: PreTrainedModel) -> None:
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
        settings = ContinuousBatchingConfig(
            page_size=256, num_blocks=96, max_batch_tokens=512, max_requests_per_batch=16
        )
        self._manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=settings)
        self._manager.start()
        self._round = 0

    def serve(self, workload: Workload) -> Sequence[Served]:
        self._round += 1
        begin = time.perf_counter()
        served: dict[str, Served] = {}
        for number, job in enumerate(workload.jobs):
            request_id = self._manager.add_request(
                list(job.prompt),
                request_id=f"{self._round}.{number}",
                max_new_tokens=job.num_new,
                eos_token_id=-1,
                streaming=True,
            )
            served[request_id] = Served()
        left = len(served)
        while left:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            answer = served[result.request_id]
            answer.last = time.perf_counter() - begin
            answer.first = answer.first or answer.last
            if result.is_finished():
                answer.tokens = list(result.generated_tokens)
                left -= 1
        return list(served.values())

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)
