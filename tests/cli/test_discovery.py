"""Policies of other packages are found in every process that looks for them, once each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .conftest import clean_environment

KINDS = {
    "scheduler": ("Scheduler", "swapserve_register_scheduler", "def schedule(self, plan): pass"),
    "kv": (
        "KVManager",
        "swapserve_register_kv_manager",
        "fits = reserve = lambda self, request, cached, total: False\n"
        "    table = free = lambda self, request: ()\n"
        "    usage = lambda self: 0.0",
    ),
    "speculator": (
        "Speculator",
        "swapserve_register_speculator",
        "max_draft = 0\n    propose = lambda self, requests: {}",
    ),
}
MODULE = """
import swapserve


class Mine(swapserve.{parent}):
    name = "mine"
    {body}


@swapserve.hookimpl
def {hook}():
    return Mine
"""
LOOK = """
import json, multiprocessing, os, sys

def look():
    import swapserve
    plugins = swapserve.Plugins()
    found = {kind: plugins.policy(kind, "mine").__module__ for kind in ("scheduler", "kv", "speculator")}
    for record in plugins.records:
        plugins.load(record)
        plugins.load(record)
    plugins.load_watchers()
    mine = [plugin for plugin in plugins.manager.get_plugins() if plugin.__name__.startswith("acme")]
    return {"pid": os.getpid(), "found": found, "registered": len(mine)}

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([look(), pool.apply(look)]))
"""


def test_h61_outside_policies_are_found_in_every_process_and_once_each(
    install: Callable[..., Path], tmp_path: Path
) -> None:
    for kind, (parent, hook, body) in KINDS.items():
        site = install(f"acme-{kind}", f"{kind}_mine", MODULE.format(parent=parent, hook=hook, body=body))
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=clean_environment(PYTHONPATH=path)
    )
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout)
    assert here["pid"] != there["pid"]
    for seen in (here, there):
        assert seen["found"] == {kind: f"acme_{kind}" for kind in KINDS}
        assert seen["registered"] == 3


def test_h61_a_policy_that_a_process_does_not_know_is_an_error_when_it_starts(serve) -> None:
    done = serve("--scheduler", "acme", "--port", "0")
    assert done.returncode == 2
    assert "there is no scheduler 'acme'" in done.stderr
