"""Every setting of a server in one model, and where its value comes from: flags, environment, file, default.

A field of `Settings` is a flag (`--max-num-seqs`), a variable (`SWAPSERVE_MAX_NUM_SEQS`) and a key of the file
(`max_num_seqs` or `max-num-seqs`). Names and meanings are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from swapserve.aliases import ALIASES, fold_aliases

ENVIRONMENT_PREFIX = "SWAPSERVE_"
OTHER_VARIABLES = frozenset({"SWAPSERVE_CACHE"})
"""Variables with our prefix that are no setting of a server."""


class SettingsError(ValueError):
    """A setting cannot be used; the message says which, where it was given and what would be right."""


@dataclass(frozen=True)
class Flag:
    """How a setting appears on the command line."""

    group: str
    metavar: str | None = None
    """What stands for the value in the help."""
    default: str | None = None
    """How the help words a default of None."""


def _as_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _from_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


MODEL, POLICIES, LIMITS, MEMORY, SERVER, ALIAS = (
    "Model", "Policies", "Limits of a step", "Memory", "Server", "Other names, as in vLLM",
)  # fmt: skip


class Settings(BaseModel):
    """What a server is made of. Fields of None mean what their description says."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=False)

    model: Annotated[str | None, Flag(MODEL)] = Field(
        None, description="A folder, a GGUF file or a hub name; without one, the demo model."
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Flag(MODEL)] = Field(
        "auto", description="Number type of weights and KV cache; auto: the device's own choice."
    )
    device: Annotated[str, Flag(MODEL, "auto|cpu|cuda[:N]")] = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="Where the model runs; auto: a GPU when there is one."
    )
    attention_backend: Annotated[Literal["auto", "reference", "cpu", "triton"], Flag(MODEL)] = Field(
        "auto", description="Attention kernels; auto: the fastest that runs on the device."
    )
    max_model_len: Annotated[int | None, Flag(MODEL, "TOKENS", "the model's own")] = Field(
        None, ge=1, description="Longest prompt and answer together."
    )
    chat_template: Annotated[str | None, Flag(MODEL, "FILE", "the model's own")] = Field(
        None, description="A Jinja template for chat requests: a file, or the template itself."
    )
    seed: Annotated[int, Flag(MODEL)] = Field(0, ge=0, description="Seed of requests that give none.")

    scheduler: Annotated[str, Flag(POLICIES, "NAME[,KEY=VALUE…]")] = Field(
        "chunked", description="Who runs in a step, and how much of each."
    )
    kv: Annotated[str, Flag(POLICIES, "NAME[,KEY=VALUE…]")] = Field(
        "prefix", description="Where keys and values are kept."
    )
    speculator: Annotated[str, Flag(POLICIES, "NAME[,KEY=VALUE…]")] = Field(
        "none", description="Who guesses tokens ahead."
    )

    max_num_seqs: Annotated[int, Flag(LIMITS)] = Field(128, ge=1, description="Most requests in one step.")
    max_num_batched_tokens: Annotated[
        int | None,
        Flag(LIMITS, "TOKENS", "512 on a CPU, 2048 on a GPU; 2048 and 8192 with a scheduler that splits no prompts"),
    ] = Field(None, ge=1, description="Most tokens in one step.")

    gpu_memory_utilization: Annotated[float, Flag(MEMORY, "SHARE")] = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory to use; nothing on a CPU."
    )
    kv_cache_memory_bytes: Annotated[ByteSize | None, Flag(MEMORY, "SIZE", "measured at start")] = Field(
        None, gt=0, description="Memory for the KV cache, such as 2GiB or 512MB, on any device."
    )
    num_gpu_blocks_override: Annotated[int | None, Flag(MEMORY, "BLOCKS", "from the memory")] = Field(
        None, ge=1, description="Number of KV blocks, whatever the memory."
    )

    host: Annotated[str, Flag(SERVER)] = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Flag(SERVER)] = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    api_key: Annotated[str | None, Flag(SERVER, "KEY", "open to all")] = Field(
        None, min_length=1, description="Bearer token that every request must carry."
    )
    served_model_name: Annotated[
        tuple[str, ...], BeforeValidator(_as_list), Flag(SERVER, "NAME", "the model's name")
    ] = Field((), description="Name in the API; give it again for further names.")

    block_size: Annotated[int | None, Flag(ALIAS, "TOKENS", "the KV manager's own")] = Field(
        None, ge=1, description="The KV manager's option block_size."
    )
    enable_prefix_caching: Annotated[bool | None, Flag(ALIAS, default="unset")] = Field(
        None, description="--kv prefix, or --kv paged."
    )
    enable_chunked_prefill: Annotated[bool | None, Flag(ALIAS, default="unset")] = Field(
        None, description="--scheduler chunked, or --scheduler continuous."
    )
    speculative_config: Annotated[dict[str, Any] | None, BeforeValidator(_from_json), Flag(ALIAS, "JSON", "unset")] = (
        Field(None, description='--speculator, as {"method": "ngram", "num_speculative_tokens": 4} or {"model": …}.')
    )

    def lines(self) -> str:
        """These settings as YAML that `--config` reads back, without the API key."""
        shown = self.model_dump(mode="json", exclude={"api_key", *ALIASES}, exclude_none=True)
        return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def flag_of(info: FieldInfo) -> Flag:
    """The `Flag` of a field of `Settings`."""
    return next(item for item in info.metadata if isinstance(item, Flag))


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """The values a field is limited to, or none."""
    return tuple(str(value) for value in get_args(info.annotation) if isinstance(value, str))


@dataclass(frozen=True)
class Source:
    """Settings from one place; `spell` says how that place writes the name of a field."""

    values: Mapping[str, Any]
    where: Literal["flag", "environment", "file", "argument"]
    file: str = ""

    def spell(self, name: str) -> str:
        """The name as the user wrote it, for messages."""
        if self.where == "flag":
            return "MODEL" if name == "model" else "--" + name.replace("_", "-")
        if self.where == "environment":
            return ENVIRONMENT_PREFIX + name.upper()
        return f"{name} in {self.file}" if self.where == "file" else name


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, config: str | None = None
) -> Settings:
    """Settings from flags over environment over file over defaults; `SettingsError` says what is wrong with one."""
    sources = [
        Source(flags, "flag"),
        Source(_from_environment(os.environ if environment is None else environment), "environment"),
    ]
    if config is not None:
        sources.append(Source(_from_file(config), "file", config))
    return merge(sources)


def merge(sources: Sequence[Source]) -> Settings:
    """Settings from several sources, the first one first; other names for policies are folded into the policies."""
    values: dict[str, Any] = {}
    origins: dict[str, Source] = {}
    ranks: dict[str, int] = {}
    for rank, source in enumerate(sources):
        for name, value in source.values.items():
            if name not in values:
                values[name], origins[name], ranks[name] = value, source, rank
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(one, origins) for one in error.errors())) from None
    try:
        folded = fold_aliases(settings.model_dump(include=settings.model_fields_set), ranks)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return settings.model_copy(update={**folded, **dict.fromkeys(ALIASES)})


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that name no setting: most often a slip of the pen."""
    environment = os.environ if environment is None else environment
    known = {ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value is not None and value != ""}


def _from_file(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"--config {path}: it must hold lines of the form `key: value`, such as `port: 8000`")
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields:
            raise SettingsError(f"--config {path}: there is no setting {key!r}; there are: {', '.join(_names())}")
        if name in values:
            raise SettingsError(f"--config {path}: {name} is given twice")
        if value is not None:
            values[name] = value
    return values


def _names() -> list[str]:
    return [name.replace("_", "-") for name in Settings.model_fields]


def _explain(error: Any, origins: Mapping[str, Source]) -> str:
    """One of pydantic's errors as a clause that names the flag, variable or key."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; there are: {', '.join(Settings.model_fields)}"
    spelled = origins[name].spell(name) if name in origins else name
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"write {flag_of(Settings.model_fields[name]).metavar}"
    return f"{spelled}: {message[0].lower()}{message[1:]}, not {error['input']!r}"
