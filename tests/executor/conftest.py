"""Tiny random models of several families, and a player that serves requests on an executor step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from swapserve.batch import Batch, Slice, Work
from swapserve.executor import TorchExecutor
from swapserve.params import SamplingParams
from swapserve.request import Draft, Request

VOCAB = 96
WINDOW = 8

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.25,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"},
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=ALTERNATE,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "phi3": lambda: transformers.Phi3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=ALTERNATE,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=40,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE | dict(num_attention_heads=6), sliding_window=WINDOW, layer_types=ALTERNATE
    ),
    "gemma3-one-kv-head": lambda: transformers.Gemma3TextConfig(
        **SHAPE | dict(num_key_value_heads=1), sliding_window=WINDOW, layer_types=ALTERNATE
    ),
    "granite": lambda: transformers.GraniteConfig(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}, logits_scaling=3.0
    ),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny random model, made when it is first asked for."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if "norm" in name:  # fresh norms are all alike, which would hide one that is left out
                    torch.nn.init.normal_(parameter, mean=1.0 if "gemma" not in family else 0.0, std=0.2)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Prompts shorter and longer than a window, a block and a chunk."""
    rng = random.Random(3)
    return [tuple(rng.randrange(2, VOCAB) for _ in range(length)) for length in (1, 3, 7, 13, 29, 40)]


@pytest.fixture(scope="session")
def transformers_tokens(model_folder, prompts) -> Callable[[str, int], list[list[int]]]:
    """What transformers' own greedy generation gives, one prompt at a time: prompt and output."""
    known: dict[tuple[str, int], list[list[int]]] = {}

    def tokens(family: str, num_new: int) -> list[list[int]]:
        if (family, num_new) not in known:
            model = AutoModelForCausalLM.from_pretrained(model_folder(family), attn_implementation="eager").eval()
            known[family, num_new] = [
                model.generate(
                    torch.tensor([prompt]), do_sample=False, max_new_tokens=num_new, pad_token_id=0, eos_token_id=-1
                )[0].tolist()
                for prompt in prompts
            ]
        return known[family, num_new]

    return tokens


class Player:
    """Serves requests with slices of its own choosing, over block tables in shuffled order."""

    def __init__(self, executor: TorchExecutor, seed: int, *, max_chunk: int = 6, max_draft: int = 0) -> None:
        self.executor = executor
        self.rng = random.Random(seed)
        self.max_chunk, self.max_draft = max_chunk, max_draft
        self.free = list(range(executor.num_blocks))
        self.rng.shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.works: list[Work] = []

    def play(self, requests: Sequence[Request], truth: Sequence[Sequence[int]] | None = None) -> None:
        """Serve all to the end; `truth`, their right answers, makes drafts that are partly right."""
        answers = {request.id: list(tokens) for request, tokens in zip(requests, truth or [], strict=False)}
        while live := [request for request in requests if not request.finished]:
            picked = [request for request in live if self.rng.random() < 0.7] or live[:1]
            self.rng.shuffle(picked)
            self.step(picked, answers)

    def step(self, requests: Sequence[Request], answers: dict[str, list[int]]) -> None:
        self.works = [self.work(request, answers.get(request.id)) for request in requests]
        verdicts = self.executor.execute(Batch(self.works, self.executor.block_size))
        for work, verdict in zip(self.works, verdicts, strict=True):
            assert verdict.error is None
            if work.slice.samples:
                work.slice.request.accept(verdict.tokens)
            else:
                assert not verdict.tokens
                work.slice.request.computed = work.slice.end

    def work(self, request: Request, answer: list[int] | None) -> Work:
        if self.max_draft and answer and not request.prefilling:
            request.draft = self.draft(request, answer)
        count = min(request.pending, self.rng.randint(1, self.max_chunk)) if request.prefilling else request.pending
        piece = Slice(request, request.computed, count)
        draft = request.draft.tokens if request.draft else ()
        table = self.tables.setdefault(request.id, [])
        while len(table) * self.executor.block_size < piece.end:
            table.append(self.free.pop())
        return Work(piece, (request.tokens + list(draft))[piece.start : piece.end], table)

    def draft(self, request: Request, answer: list[int]) -> Draft | None:
        """A few tokens to come, right up to a place chosen at random."""
        length = min(self.rng.randint(0, self.max_draft), request.draft_room)
        right = self.rng.randint(0, length)
        begin = len(request.tokens)
        tokens = [(token + (place >= right)) % VOCAB for place, token in enumerate(answer[begin : begin + length])]
        return Draft(tuple(tokens)) if tokens else None


@pytest.fixture
def player() -> type[Player]:
    return Player


@pytest.fixture
def greedy_requests(prompts) -> Callable[..., list[Request]]:
    def make(num_new: int, **params: object) -> list[Request]:
        wanted = SamplingParams(max_tokens=num_new, temperature=0.0, **params)
        return [Request(f"r{i}", p, wanted, max_len=len(p) + num_new) for i, p in enumerate(prompts)]

    return make
