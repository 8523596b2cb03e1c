"""From settings to an engine, cheapest checks first: names and options before the weights, sizes after them.

Importing this module imports no torch: what a user may have got wrong is said before anything slow begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swapserve import __version__
from swapserve.config import Settings, SettingsError
from swapserve.demo import DemoModelMissing, demo_model_path
from swapserve.engine import Engine
from swapserve.model_errors import ModelError
from swapserve.openmp import wait_politely
from swapserve.plugins import PluginError, Plugins, PolicyClass
from swapserve.policies import KVManager, ModelInfo, OpenModel, PolicyOptions, Speculator
from swapserve.spec import PolicySpec, check_options
from swapserve.tokenizer import Tokenizer, read_template

if TYPE_CHECKING:
    from swapserve.batch import Executor
    from swapserve.memory import PoolSize
    from swapserve.model import LoadedModel

Progress = Callable[[str], None]
DEMO_MODEL_NAME = "gemma-3-270m"
DEFAULT_BLOCK_SIZE = 16
"""For a KV manager that has no option `block_size` and no `block_size` of its own: vLLM's."""


@dataclass(frozen=True)
class ChosenPolicy:
    """A policy class with its options, checked and not made yet."""

    kind: str
    policy: PolicyClass
    options: PolicyOptions

    def make(self, *arguments: object) -> Any:
        """The policy, made with its options and what else its kind is given; `PluginError` for a value it refuses."""
        try:
            return self.policy(self.options, *arguments)  # type: ignore[arg-type]
        except (PluginError, ModelError):
            raise
        except ValueError as error:
            raise PluginError(f"{self.kind} {self.policy.name!r}: {error}") from error

    def __str__(self) -> str:
        given = self.options.model_dump(mode="json", exclude_none=True)
        options = ", ".join(f"{key}={value}" for key, value in given.items())
        return f"{self.policy.name} ({options})" if options else self.policy.name


@dataclass(frozen=True)
class Policies:
    """The three policies of a server."""

    scheduler: ChosenPolicy
    kv: ChosenPolicy
    speculator: ChosenPolicy


@dataclass
class Served:
    """An engine with the model it serves and what was chosen for it."""

    engine: Engine
    model: LoadedModel
    tokenizer: Tokenizer
    names: tuple[str, ...]
    """What the model is called in the API, the usual name first."""
    chosen: dict[str, str]
    """What a person wants to see at start, by subject."""


def choose_policies(settings: Settings, plugins: Plugins) -> Policies:
    """Find the policies and check their options; `PluginError` says what there is instead. Loads no model."""
    chosen = {}
    for kind in ("scheduler", "kv", "speculator"):
        spec = PolicySpec.parse(getattr(settings, kind))
        policy = plugins.policy(kind, spec.name)
        chosen[kind] = ChosenPolicy(kind, policy, check_options(kind, policy, spec))
    return Policies(**chosen)


def find_model(settings: Settings, progress: Progress) -> str:
    """The model's folder, file or hub name; the demo model's when none is named.

    Raises `SettingsError` for a path that is not there, or a chat template, before anything slow is imported.
    """
    if settings.chat_template is not None:
        try:
            read_template(settings.chat_template)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    if settings.model is None:
        try:
            return str(demo_model_path(progress))
        except DemoModelMissing as error:
            raise SettingsError(f"no model is named, and {error}") from None
    path = Path(settings.model).expanduser()
    looks_like_path = settings.model.startswith((".", "/", "~")) or path.suffix == ".gguf" or len(path.parts) > 2
    if looks_like_path and not path.exists():
        raise SettingsError(
            f"there is no file or folder {settings.model}: name a model's folder, a .gguf file or a hub name"
        )
    return settings.model


def build_engine(
    settings: Settings, plugins: Plugins, policies: Policies, progress: Progress = lambda message: None
) -> Served:
    """Load the model, size the KV pool by what memory is left, and put the engine together.

    Raises `SettingsError`, `PluginError` or a `ModelError`, each with one sentence.
    """
    source = find_model(settings, progress)
    progress(f"swapserve {__version__}")
    wait_politely()
    from swapserve.executor import TorchExecutor
    from swapserve.model import load_model

    backend = None if settings.attention_backend == "auto" else settings.attention_backend
    model = load_model(
        source,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        backend=backend,
        progress=progress,
    )
    settings = _with_step_size(settings, policies, model)
    progress(f"preparing the attention kernels ({model.kernels.name})")
    for num_heads, num_kv_heads, head_dim in {(one.num_heads, one.num_kv_heads, one.head_dim) for one in model.layers}:
        model.kernels.prepare(num_heads, num_kv_heads, head_dim, model.dtype)
    info = _model_info(model, settings, progress)
    # A speculator with a model of its own takes memory: it comes before the rest is counted.
    speculator: Speculator = policies.speculator.make(info)
    block_size = getattr(policies.kv.options, "block_size", DEFAULT_BLOCK_SIZE)
    size = _pool_size(model, settings, block_size, progress)
    kv: KVManager = policies.kv.make(size.num_tokens)
    executor = TorchExecutor(model, kv.num_slots // kv.block_size, kv.block_size)
    engine = Engine(
        executor=executor,
        scheduler=policies.scheduler.make(),
        kv=kv,
        speculator=speculator,
        model=info,
        plugins=plugins.load_watchers(),
        seed=settings.seed,
    )
    tokenizer = Tokenizer(model.tokenizer, settings.chat_template)
    names = settings.served_model_name or (settings.model or DEMO_MODEL_NAME,)
    return Served(engine, model, tokenizer, names, _chosen(policies, engine, model, size))


def _with_step_size(settings: Settings, policies: Policies, model: LoadedModel) -> Settings:
    """The settings with a limit of tokens in a step: small where prompts may be split, as a step takes memory."""
    if settings.max_num_batched_tokens is not None:
        return settings
    splits = policies.scheduler.policy.splits_prompts  # type: ignore[union-attr]
    small, large = (512, 2048) if model.device.type == "cpu" else (2048, 8192)
    return settings.model_copy(update={"max_num_batched_tokens": small if splits else large})


def _model_info(model: LoadedModel, settings: Settings, progress: Progress) -> ModelInfo:
    """What policies may know of the model that is served."""
    assert settings.max_num_batched_tokens is not None, "the step's size is settled by now"
    return ModelInfo(
        name=model.name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocabulary=lambda: Tokenizer(model.tokenizer).vocabulary(),
        open_model=lambda name: _open_beside(name, model, settings, progress),
    )


def _open_beside(name: str, served: LoadedModel, settings: Settings, progress: Progress) -> OpenModel:
    """Another model on the device, with the number type and the kernels of the one that is served."""
    from swapserve.executor import TorchExecutor
    from swapserve.model import load_model

    other = load_model(
        name,
        dtype=str(served.dtype).removeprefix("torch."),
        device=str(served.device),
        backend=served.kernels.name,
        progress=progress,
    )

    def executor(num_blocks: int, block_size: int) -> Executor:
        return TorchExecutor(other, num_blocks, block_size)

    return OpenModel(_model_info(other, settings, progress), executor)


def _pool_size(model: LoadedModel, settings: Settings, block_size: int, progress: Progress) -> PoolSize:
    """How many KV blocks there are: what was asked for, or what memory holds."""
    assert settings.max_num_batched_tokens is not None, "the step's size is settled by now"
    from swapserve.memory import PoolSize, size_pool

    if settings.num_gpu_blocks_override is not None:
        size = PoolSize(settings.num_gpu_blocks_override, block_size, model.kv_bytes_per_token, model.max_model_len)
    else:
        progress("sizing the KV cache")
        size = size_pool(
            model,
            block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        )
    if size.warning is not None:
        progress(f"Warning: {size.warning}")
    return size


def _chosen(policies: Policies, engine: Engine, model: LoadedModel, size: PoolSize) -> dict[str, str]:
    """What was chosen, in the words of the start message."""
    limits = engine.limits
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "model": f"{model.name}: {dtype} on {model.device}, context of {model.max_model_len} tokens",
        "attention": model.kernels.name,
        "scheduler": str(policies.scheduler),
        "kv": str(policies.kv),
        "speculator": str(policies.speculator),
        "step": f"at most {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens",
        "KV cache": f"{size.num_blocks} blocks of {size.block_size}, {size.num_tokens} tokens, "
        f"{size.num_bytes / 2**20:.0f} MiB: {size.num_longest_requests:.1f} requests of the greatest length",
    }
