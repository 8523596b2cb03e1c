"""The text that names a policy and its options, as on the command line: `chunked,chunk_size=512`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from swapserve.plugins import PluginError, PolicyClass
from swapserve.policies import PolicyOptions


@dataclass(frozen=True)
class PolicySpec:
    """The name of a policy (or `package.module:Class`) and its options, as text."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """`NAME[,key=value…]`, or `kind=NAME,key=value…`; `PluginError` says what is wrong with other text."""
        name = ""
        options: dict[str, str] = {}
        for position, part in enumerate(text.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if position == 0 and not equals:
                name = key
            elif key == "kind" and not name:
                name = value
            elif not equals or not key:
                raise PluginError(f"{text!r}: {part!r} is not key=value; write NAME,key=value,key=value")
            elif key in options:
                raise PluginError(f"{text!r}: the option {key!r} is given twice")
            else:
                options[key] = value
        if not name:
            raise PluginError(f"{text!r} names no policy: write NAME or NAME,key=value")
        return cls(name, options)

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def check_options(kind: str, policy: PolicyClass, spec: PolicySpec) -> PolicyOptions:
    """The options of a spec as the policy's own model; `PluginError` lists what is allowed."""
    model: type[PolicyOptions] = policy.Options
    try:
        return model.model_validate(dict(spec.options))
    except ValidationError as error:
        wrong = []
        for one in error.errors():
            key = ".".join(str(part) for part in one["loc"]) or "options"
            if one["type"] == "extra_forbidden":
                wrong.append(f"there is no option {key!r}")
            elif one["type"] == "missing":
                wrong.append(f"the option {key!r} is needed")
            else:
                wrong.append(f"{key}={one['input']}: {one['msg'][0].lower()}{one['msg'][1:]}")
        known = "; ".join(describe_options(model)) or "none"
        raise PluginError(f"{kind} {spec.name!r}: {', '.join(wrong)}. Its options: {known}") from error


def describe_options(model: type[PolicyOptions]) -> list[str]:
    """One line an option: name, type, default and what it is for."""
    lines = []
    for name, info in model.model_fields.items():
        kind = getattr(info.annotation, "__name__", str(info.annotation))
        default = "required" if info.default is PydanticUndefined else f"default {info.default}"
        lines.append(f"{name} ({kind}, {default})" + (f": {info.description}" if info.description else ""))
    return lines
