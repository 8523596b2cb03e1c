"""The one place where settings become command-line options: a field of `Settings` is an option, with its help.

Values stay text here. `Settings` checks them, so that a flag, a variable and a line of the file are refused alike.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from typing import Any, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from swapserve.config import Settings, SettingsError, choices_of, flag_of, load_settings, unknown_variables

FILE_OPTIONS = "Settings from elsewhere"
METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


class Refused(click.ClickException):
    """The user asked for something that cannot be had: one sentence on stderr and exit code 2."""

    exit_code = 2


class GroupedOption(click.Option):
    """An option that stands under a heading in the help."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class SettingsCommand(click.Command):
    """A command that takes every setting as an option, besides options of its own."""

    def __init__(
        self, name: str | None, *, leave_out: Collection[str] = (), params: Sequence[click.Parameter], **kwargs: Any
    ) -> None:
        """`leave_out` names groups of settings that mean nothing to this command."""
        everything = [*_setting_parameters(leave_out), *params, *_file_parameters()]
        super().__init__(name, params=everything, **kwargs)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def settings_from(parameters: dict[str, Any]) -> Settings:
    """The settings that a command was given; prints them and leaves where `--print-config` asks for that."""
    flags = {
        name: value
        for name, value in parameters.items()
        if name in Settings.model_fields and value is not None and value != ()
    }
    try:
        settings = load_settings(flags, config=parameters["config"])
    except SettingsError as error:
        raise Refused(str(error)) from None
    if parameters["print_config"]:
        click.echo(settings.lines(), nl=False)
        click.get_current_context().exit()
    for name in unknown_variables():
        click.echo(f"Warning: the variable {name} names no setting and is not used", err=True)
    return settings


def _setting_parameters(leave_out: Collection[str]) -> list[click.Parameter]:
    parameters: list[click.Parameter] = []
    for name, info in Settings.model_fields.items():
        if name == "model":
            parameters.append(click.Argument(["model"], required=False, default=None))
        elif flag_of(info).group not in leave_out:
            parameters.append(_option(name, info))
    return parameters


def _option(name: str, info: FieldInfo) -> GroupedOption:
    flag = flag_of(info)
    spelled = name.replace("_", "-")
    kind, is_list = _kind(info)
    default = flag.default or info.get_default(call_default_factory=True)
    shown = f"{info.description}  [default: {default}]"
    if kind is bool:
        return GroupedOption([f"--{spelled}/--no-{spelled}"], default=None, help=shown, group=flag.group)
    metavar = flag.metavar or "|".join(choices_of(info)) or METAVARS[kind]
    return GroupedOption(
        [f"--{spelled}"], default=None, metavar=metavar, multiple=is_list, help=shown, group=flag.group
    )


def _kind(info: FieldInfo) -> tuple[type, bool]:
    """The plain type of a field's values, and whether it takes several."""
    annotation: Any = info.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True
    return (annotation if isinstance(annotation, type) else str), False


def _file_parameters() -> list[click.Parameter]:
    return [
        GroupedOption(
            ["--config"], metavar="FILE", group=FILE_OPTIONS,
            help="YAML file of settings by their names above. Flags win over SWAPSERVE_<NAME> variables, "
            "variables over the file, the file over defaults.",
        ),
        GroupedOption(
            ["--print-config"], is_flag=True, group=FILE_OPTIONS, help="Print the settings as such a file and leave."
        ),
    ]  # fmt: skip
