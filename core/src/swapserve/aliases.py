"""Names that vLLM's users know for what is a choice of policy here, folded into that choice.

A name given beside the policy itself is fine where the two agree. Where they do not, the one from the stronger source
wins (a flag over a variable over the file), and two of one source are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swapserve.spec import PolicySpec

SWITCHES = {
    "enable_prefix_caching": ("kv", "prefix", "paged"),
    "enable_chunked_prefill": ("scheduler", "chunked", "continuous"),
}
"""Name of the switch: the kind of policy, the policy when it is on, the policy when it is off."""

METHODS = {"ngram": "ngram", "draft_model": "draft", "draft": "draft"}
"""vLLM's speculation methods by the names of our speculators."""

KEYS = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "draft": ("num_speculative_tokens", "model"),
}
"""For each speculator, the keys of vLLM's JSON that are its options, under the same names."""

ALIASES = frozenset({*SWITCHES, "block_size", "speculative_config"})


def fold_aliases(given: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, str]:
    """The policies to use, as text, where a setting names one; `ValueError` for two that contradict each other.

    `given` holds the settings that were given and `ranks` where each is from, the strongest source 0.
    """
    chosen = {kind: str(given[kind]) for kind in ("scheduler", "kv", "speculator") if kind in given}
    for kind, text in chosen.items():
        _parse(kind, text)
    for switch, (kind, policy_on, policy_off) in SWITCHES.items():
        if (on := given.get(switch)) is None:
            continue
        wanted = policy_on if on else policy_off
        if kind in chosen:
            name = _parse(kind, chosen[kind]).name
            # "Off" is at peace with any policy but the one that is "on": `--kv contiguous` caches no prefix either.
            if name == wanted or (not on and name != policy_on):
                continue
            if not _stronger(switch, kind, ranks, f"{_flag(switch, on)} means --{kind} {wanted}", name):
                continue
        chosen[kind] = wanted
    if (speculation := given.get("speculative_config")) is not None:
        spec = _speculator(speculation)
        given_name = _parse("speculator", chosen["speculator"]).name if "speculator" in chosen else None
        if given_name is None or _stronger(
            "speculative_config", "speculator", ranks, f"--speculative-config means --speculator {spec}", given_name
        ):
            chosen["speculator"] = str(spec)
    if (block_size := given.get("block_size")) is not None:
        chosen["kv"] = _with_block_size(chosen.get("kv", "prefix"), block_size, ranks)
    return chosen


def _with_block_size(text: str, block_size: int, ranks: Mapping[str, int]) -> str:
    spec = _parse("kv", text)
    own = spec.options.get("block_size")
    if own is not None and (
        own == str(block_size)
        or not _stronger("block_size", "kv", ranks, f"--block-size {block_size} was given", f"{text}")
    ):
        return text
    return str(PolicySpec(spec.name, {**spec.options, "block_size": str(block_size)}))


def _stronger(alias: str, kind: str, ranks: Mapping[str, int], meaning: str, name: str) -> bool:
    """Whether the alias outranks the policy given beside it; `ValueError` when both come from one source."""
    if ranks[alias] == ranks[kind]:
        raise ValueError(f"{meaning}, but --{kind} {name} was given too: leave one of them out")
    return ranks[alias] < ranks[kind]


def _speculator(config: Mapping[str, Any]) -> PolicySpec:
    """vLLM's JSON as one of our speculators with its options."""
    rest = {str(key): value for key, value in config.items()}
    method = rest.pop("method", None) or ("draft_model" if "model" in rest else None)
    if method not in METHODS:
        raise ValueError(
            f"--speculative-config: the method {method!r} is not known here; there are: {', '.join(METHODS)} "
            "(any other speculator is chosen with --speculator)"
        )
    name = METHODS[method]
    options = {}
    for key, value in rest.items():
        if key not in KEYS[name]:
            raise ValueError(
                f"--speculative-config: the method {method!r} has no key {key!r}; it has: {', '.join(KEYS[name])}"
            )
        options[key] = str(value)
    return PolicySpec(name, options)


def _parse(kind: str, text: str) -> PolicySpec:
    try:
        return PolicySpec.parse(text)
    except ValueError as error:
        raise ValueError(f"--{kind} {error}") from None


def _flag(switch: str, on: bool) -> str:
    return "--" + ("" if on else "no-") + switch.replace("_", "-")
