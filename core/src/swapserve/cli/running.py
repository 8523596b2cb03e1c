"""What the commands that run a model share: progress on stderr, and one sentence for what a user got wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from swapserve.cli.options import Refused
from swapserve.config import SettingsError
from swapserve.model_errors import ModelError
from swapserve.plugins import PluginError


class Reporter:
    """Prints what is going on, each line with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, message: str) -> None:
        click.echo(f"[{time.monotonic() - self._started:6.1f} s] {message}", err=True)

    def table(self, facts: dict[str, str]) -> None:
        """Several facts, one a line, their names in a column."""
        width = max(map(len, facts))
        for name, fact in facts.items():
            self(f"  {name:<{width}}  {fact}")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what a user got wrong into one sentence and exit code 2."""
    # A plugin that is left out is worth a line; its traceback is for `serve plugins --verbose`.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        yield
    except (SettingsError, PluginError, ModelError) as error:
        raise Refused(" ".join(str(error).split())) from error
