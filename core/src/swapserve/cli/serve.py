"""`serve [MODEL]`: check everything that can be checked at once, then load the model and answer requests."""

from __future__ import annotations

import json
import shlex
from typing import Any

import click

from swapserve.cli.options import Refused, SettingsCommand, settings_from
from swapserve.cli.running import Reporter, refusals
from swapserve.config import Settings


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
        from swapserve.server.running import PortTaken, bind, run_server

        try:
            listener = bind(settings.host, settings.port)
        except PortTaken as error:
            raise Refused(str(error)) from None
        plugins = Plugins()
        policies = choose_policies(settings, plugins)
        served = build_engine(settings, plugins, policies, report)
        report.table(served.chosen)

    from swapserve.async_engine import AsyncEngine
    from swapserve.server.state import ServerState

    if not served.tokenizer.has_chat_template:
        report("Warning: this model has no chat template: chat requests need --chat-template FILE")
    state = ServerState(
        engine=AsyncEngine(served.engine, served.tokenizer),
        tokenizer=served.tokenizer,
        model_names=served.names,
        api_keys=() if settings.api_key is None else (settings.api_key,),
        info=served.chosen,
    )

    def ready() -> None:
        report(f"ready; try\n{_try_line(settings, listener.getsockname()[1], served.names[0])}")

    run_server(state, listener, announce=report, ready=ready)
    report("all requests are answered; bye")


def _try_line(settings: Settings, port: int, model: str) -> str:
    """A line for a shell that asks this server for a few words."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $SWAPSERVE_API_KEY"'
    url = f"http://{host}:{port}/v1/completions"
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
