"""The plugin that the README shows: its files are taken from there, built, installed, found by name and put to work."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import DISTRIBUTIONS, ROOT, Elsewhere

BLOCK = re.compile(r"^```\w+\n# (\S+\.(?:py|toml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The files in the README, by name: code blocks that begin with a comment that is a file name."""
    return dict(BLOCK.findall((ROOT / "README.md").read_text()))


@pytest.fixture
def installed(
    files: dict[str, str], build_wheel: Callable[[Path], Path], elsewhere: Elsewhere, tmp_path: Path
) -> list[Path]:
    """Where core and the README's plugin are installed."""
    source, core, plugin = tmp_path / "source", tmp_path / "core", tmp_path / "plugin"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    elsewhere.install(build_wheel(DISTRIBUTIONS["swapserve"]), core)
    elsewhere.install(build_wheel(source), plugin)
    return [core, plugin]


def test_the_plugin_is_about_thirty_lines(files: dict[str, str]) -> None:
    lines = [line for line in files["swapserve_scheduler_gentle.py"].splitlines() if line.strip()]
    assert len(lines) <= 30


def test_it_is_listed_with_its_options(installed: list[Path], elsewhere: Elsewhere) -> None:
    listing = elsewhere.run("-m", "swapserve.cli", "plugins", path=installed)
    assert re.search(r"^scheduler +gentle +swapserve-scheduler-gentle +0\.1\.0 ", listing, re.MULTILINE)
    assert "newcomers (int, default 2): most requests that join in one step" in listing


def test_its_own_test_passes(
    files: dict[str, str], installed: list[Path], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    [name] = [name for name in files if name.startswith("test_")]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "source" / name)]
    assert re.search(r"\d+ passed", elsewhere.run(*words, path=installed))
