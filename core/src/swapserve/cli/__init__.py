"""The command `serve`, also installed as `swapserve`: it serves a model, unless its first word names another command.

Nothing here imports torch or a plugin before a command needs it, so that help and errors come at once.
"""

from __future__ import annotations

from typing import Any

import click

from swapserve import __version__
from swapserve.cli.generate import generate
from swapserve.cli.plugins import plugins
from swapserve.cli.serve import serve


class ServeUnlessNamed(click.Group):
    """A group that hands everything to one command unless the first word names another."""

    def __init__(self, default: click.Command, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.default = default

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        return self.default.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


main = ServeUnlessNamed(
    click.version_option(__version__, prog_name="swapserve")(serve),
    name="serve",
    commands={"generate": generate, "plugins": plugins},
    context_settings={"help_option_names": ["-h", "--help"]},
)
