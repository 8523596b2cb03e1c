"""`serve [MODEL]`: check everything that can be checked at once, then load the model and answer requests."""

from __future__ import annotations

from typing import Any

import click

from swapserve import __version__
from swapserve.cli.options import SettingsCommand, settings_from
from swapserve.cli.running import Reporter, refusals


@click.command(
    cls=SettingsCommand,
    params=[],
    epilog="Other commands: `serve generate` answers prompts from a file, without a server; `serve plugins` lists "
    "what is installed. A folder that is called like a command is reached as ./generate.",
)
def serve(**parameters: Any) -> None:
    """Serve MODEL (a folder, a GGUF file or a hub name; without one, the demo model) over the OpenAI API.

    A policy is NAME or NAME,key=value,…, or package.module:Class for one that is not installed as a plugin;
    `serve plugins` lists names and options.
    """
    settings = settings_from(parameters)
    report = Reporter()
    with refusals():
        from swapserve.build import build_engine, choose_policies
        from swapserve.plugins import Plugins

        plugins = Plugins()
        policies = choose_policies(settings, plugins)
        report(f"swapserve {__version__}")
        served = build_engine(settings, plugins, policies, report)
        report.table(served.chosen)
