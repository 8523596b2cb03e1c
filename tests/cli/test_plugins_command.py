"""`serve plugins`: everything installed is listed with where it comes from; what is broken is named, not swallowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCHEDULER = """
from pydantic import Field
from swapserve import PolicyOptions, Scheduler, hookimpl


class Lifo(Scheduler):
    name = "{name}"

    class Options(PolicyOptions):
        depth: int = Field(3, description="how deep it looks")

    def schedule(self, plan):
        for request in plan.running:
            plan.make_room_for(request)


@hookimpl
def swapserve_register_scheduler():
    return Lifo
"""
WATCHER = """
from swapserve import hookimpl


@hookimpl
def swapserve_step_finished(report):
    pass
"""

Install = Callable[..., Path]


def test_a_plugin_is_listed_with_kind_name_distribution_version_options_and_import_time(
    serve, install: Install
) -> None:
    site = install("acme-lifo", "scheduler_lifo", SCHEDULER.format(name="lifo"), version="2.5")
    install("acme-watcher", "acme_watcher", WATCHER)
    done = serve("plugins", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    [row] = [line for line in lines if "acme-lifo" in line]
    assert row.split()[:4] == ["scheduler", "lifo", "acme-lifo", "2.5"]
    assert row.endswith(" ms")
    assert "depth (int, default 3): how deep it looks" in lines[lines.index(row) + 1]
    assert any(line.split()[:3] == ["watcher", "acme_watcher", "acme-watcher"] for line in lines)


def test_h25_an_entry_point_whose_module_is_gone_is_listed_as_broken_and_harms_nothing(serve, install: Install) -> None:
    site = install("acme-gone", "scheduler_gone", None)
    install("acme-lifo", "scheduler_lifo", SCHEDULER.format(name="lifo"))
    done = serve("plugins", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert "broken: ModuleNotFoundError: No module named 'acme_gone'" in done.stdout
    assert "scheduler   lifo" in done.stdout
    [warning] = [line for line in done.stderr.splitlines() if "acme" in line]
    assert "'scheduler_gone' of distribution acme-gone 1.0" in warning
    assert "No module named 'acme_gone'" in warning


def test_h26_verbose_shows_the_traceback_of_the_import(serve, install: Install) -> None:
    site = install("acme-broken", "kv_broken", "def deep():\n    import not_a_module_anywhere\n\n\ndeep()\n")
    plain = serve("plugins", PYTHONPATH=str(site))
    verbose = serve("plugins", "--verbose", PYTHONPATH=str(site))
    assert "Traceback" not in plain.stdout
    assert "Traceback (most recent call last)" in verbose.stdout
    assert "in deep" in verbose.stdout
    assert "No module named 'not_a_module_anywhere'" in verbose.stdout


def test_h62_help_and_version_import_no_plugin_and_no_torch(serve, install: Install) -> None:
    proof = "raise SystemExit('a plugin was imported')\n"
    site = install("acme-heavy", "scheduler_heavy", proof)
    install("acme-heavy-watcher", "heavy_watcher", proof)
    # A module found first under this name stands for torch: importing it ends the process.
    for heavy in ("torch", "transformers", "numba"):
        (site / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')\n")
    for words in (["--help"], ["--version"], ["generate", "--help"], ["plugins", "--help"], ["--print-config"]):
        done = serve(*words, PYTHONPATH=str(site))
        assert (done.returncode, done.stderr) == (0, ""), words


def test_h62_the_listing_says_how_long_each_import_took(serve, install: Install) -> None:
    site = install("acme-slow", "scheduler_slow", "import time\ntime.sleep(0.3)\n" + SCHEDULER.format(name="slow"))
    [row] = [line for line in serve("plugins", PYTHONPATH=str(site)).stdout.splitlines() if "acme-slow" in line]
    assert int(row.split()[-2]) >= 300


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_h63_two_distributions_with_one_name_are_refused_alike_in_both_orders(
    serve, install: Install, order: tuple[str, str]
) -> None:
    install("acme-one", "scheduler_same", SCHEDULER.format(name="same"), folder="one")
    site = install("acme-two", "scheduler_same", SCHEDULER.format(name="same"), folder="two")
    path = ":".join(str(site.parent / folder) for folder in order)
    done = serve("--scheduler", "same", PYTHONPATH=path)
    assert done.returncode == 2
    assert "'same' is offered by acme-one 1.0 and acme-two 1.0" in done.stderr


def test_h63_one_distribution_seen_twice_is_no_collision(serve, install: Install) -> None:
    install("acme-one", "scheduler_same", SCHEDULER.format(name="same"), folder="one")
    site = install("acme-one", "scheduler_same", SCHEDULER.format(name="same"), folder="two")
    path = f"{site.parent / 'one'}:{site}"
    done = serve("plugins", PYTHONPATH=path)
    assert done.returncode == 0
    assert "broken" not in done.stdout
