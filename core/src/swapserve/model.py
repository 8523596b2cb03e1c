"""Loads a causal language model from a folder, a GGUF file or a hub name, ready to run on packed batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from swapserve.attention import ATTENTION_NAME, AttentionStep, Kernels
from swapserve.gated_mlp import fuse_gated_mlps
from swapserve.gguf_cache import Progress, unpack_gguf
from swapserve.inspection import HeadRule, LayerFacts, check_head, inspect_attention
from swapserve.linear import pack_linears, packing_available, release_pages, return_free_memory
from swapserve.model_errors import ModelError, ModelNotFound, UnsupportedModel
from swapserve.norms import fuse_norms
from swapserve_kernels import BackendUnavailable, get_backend

__all__ = ["LoadedModel", "ModelError", "ModelNotFound", "UnsupportedModel", "load_model"]

Found = TypeVar("Found")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EMBEDDINGS_BETWEEN_RELEASES = 1024
"""Tokens looked up before the embedding's mapped pages are let go of again: 64 KB of memory each at most."""


@dataclass
class LoadedModel:
    """A model on its device: what the executor runs, and the facts that the rest of the server needs.

    `source` is the folder or hub name that weights and tokenizer come from; `name` is what the user called it.
    """

    name: str
    source: str
    module: PreTrainedModel
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    layers: tuple[LayerFacts, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    head_rule: HeadRule
    _decoder: torch.nn.Module = field(repr=False)
    _embeddings_seen: int = 0

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        """The model's tokenizer; one from the hub is read when it is first asked for."""
        return _read_tokenizer(self.name, self.source)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers) * self.dtype.itemsize

    def hidden(self, input_ids: Tensor, position_ids: Tensor, step: AttentionStep) -> Tensor:
        """Final hidden states `[T, hidden]` of a packed batch; ids and positions are `[T]` on the device."""
        answer = self._decoder(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, swapserve_step=step
        )
        self._embeddings_seen += len(input_ids)
        if self._embeddings_seen > EMBEDDINGS_BETWEEN_RELEASES:
            self.release_embeddings()
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[rows, vocab]` of hidden states `[rows, hidden]`."""
        return self.head_rule.apply(self.module.get_output_embeddings()(hidden))

    def release_embeddings(self) -> None:
        """Let go of the pages of an embedding that is mapped from its file; harmless for any other."""
        self._embeddings_seen = 0
        weight = self.module.get_input_embeddings().weight
        if isinstance(weight, Tensor):
            release_pages(weight)


def load_model(
    name_or_path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    backend: str | None = None,
    progress: Progress = lambda message: None,
) -> LoadedModel:
    """Load a model for serving: a folder with safetensors, a `.gguf` file or a name on the Hugging Face hub.

    `dtype="auto"` is float32 on a CPU, where half precision is slower or no faster, and the checkpoint's own on a GPU.
    `backend` names the attention kernels; None chooses the fastest for the device.
    Raises `ModelNotFound`, `UnsupportedModel` or another `ModelError`, each with one sentence.
    """
    place = _device(device)
    wanted = _dtype(dtype, place)
    source = _source(name_or_path, progress)
    config = _read(name_or_path, lambda: AutoConfig.from_pretrained(source))
    tokenizer = None
    if (Path(source) / "tokenizer.json").is_file():
        # Reading one takes several times the memory it keeps: the weights, which stay, come after that is given back.
        tokenizer = _read_tokenizer(name_or_path, source)
        return_free_memory()
    progress(f"loading {name_or_path}")
    with _quiet_transformers():
        module: PreTrainedModel = _read(
            name_or_path,
            lambda: AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=wanted, attn_implementation=ATTENTION_NAME
            ),
        )
    module.eval().requires_grad_(False).to(place)
    try:
        model = _prepare(name_or_path, source, module, place, backend, max_model_len)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name_or_path} ({type(module).__name__}) cannot be served: {error}") from None
    if tokenizer is not None:
        model.tokenizer = tokenizer
    return model


def _prepare(
    name: str, source: str, module: PreTrainedModel, place: torch.device, backend: str | None, max_len: int | None
) -> LoadedModel:
    """Pack the weights, look at what the model asks for, and refuse what cannot be served."""
    if not module._supports_attention_backend:
        raise UnsupportedModel("its attention does not go through transformers' attention interface")
    text_config = module.config.get_text_config()
    decoder = module.get_decoder()
    if place.type == "cpu" and packing_available():
        pack_linears(module)
        fuse_gated_mlps(module)
        fuse_norms(module)
    layers = inspect_attention(decoder, text_config, place)
    rule = HeadRule.from_config(text_config)
    check_head(module, decoder, rule, place)
    head = module.get_output_embeddings()
    model = LoadedModel(
        name=name,
        source=source,
        module=module,
        config=text_config,
        device=place,
        dtype=module.dtype,
        kernels=_kernels(backend, place),
        layers=layers,
        vocab_size=head.out_features,
        max_model_len=_max_model_len(text_config, max_len),
        eos_token_ids=_eos_token_ids(source, text_config),
        head_rule=rule,
        _decoder=decoder,
    )
    model.release_embeddings()
    return_free_memory()
    return model


def _source(name: str, progress: Progress) -> str:
    """The folder or hub name to load from; a GGUF file's is the folder it is unpacked in."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{name} holds no model: there is no config.json in that folder")
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{name} is no model: name a folder with config.json and safetensors, or a .gguf file")
        return str(unpack_gguf(path, progress))
    if path.suffix == ".gguf" or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ModelNotFound(f"there is no file or folder {name}")
    return name


def _read(name: str, read: Callable[[], Found]) -> Found:
    """Turn what transformers says of a model that it cannot read into one sentence."""
    try:
        return read()
    except OSError as error:
        where = "" if Path(name).exists() else ": there is no such folder, and the Hugging Face hub did not give it"
        raise ModelNotFound(f"{name} could not be loaded{where} ({_first_line(error)})") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{name} could not be loaded: {_first_line(error)}") from error


def _read_tokenizer(name: str, source: str) -> transformers.PreTrainedTokenizerFast:
    try:
        tokenizer: transformers.PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} has no tokenizer that can be read: {_first_line(error)}") from error
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no device {name!r}: give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but torch sees no GPU: give --device cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ModelError(f"there is no dtype {name!r}: give auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _kernels(name: str | None, device: torch.device) -> Kernels:
    try:
        return get_backend(name, device)
    except (BackendUnavailable, ValueError) as error:
        raise ModelError(str(error)) from error


def _max_model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    """The context length: what was asked for, or all that the model's positions allow."""
    limit = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for kind in kinds:
        # These change every position's rotation once a sequence is long, also of keys that are stored already.
        if kind.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, kind.get("original_max_position_embeddings") or limit)
    if wanted is not None and wanted > limit:
        raise ModelError(f"--max-model-len {wanted} is more than this model's {limit} positions: give at most {limit}")
    return wanted or limit


def _eos_token_ids(source: str, config: PreTrainedConfig) -> frozenset[int]:
    """The tokens that end an answer: of generation_config.json, else of the config."""
    try:
        found = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        found = None
    if found is None:
        found = config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


class _quiet_transformers:
    """No progress bars of transformers' own meanwhile: loading mapped weights takes no time worth one."""

    def __enter__(self) -> None:
        self._was_on = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            transformers.utils.logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
