"""The command line as a user meets it: run in a process of its own, with plugins that are installed on the spot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .tiny import save_tiny_model

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings of a server; folders on PYTHONPATH are added to its own."""
    if "PYTHONPATH" in extra and os.environ.get("PYTHONPATH"):
        extra["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWAPSERVE_")}
    if "SWAPSERVE_CACHE" in os.environ:
        kept["SWAPSERVE_CACHE"] = os.environ["SWAPSERVE_CACHE"]
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


@pytest.fixture
def serve() -> Run:
    """Runs the command with some words and gives its exit code and what it printed."""

    def run(*words: str, stdin: str = "", timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swapserve.cli", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=clean_environment(**environment),
        )

    return run


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Installs a distribution of one module under a folder; put that folder on PYTHONPATH to have it."""

    def install(
        distribution: str, entry_point: str, source: str | None, *, version: str = "1.0", folder: str = "site"
    ) -> Path:
        """`source` is the module's text; None leaves the module out, as a broken uninstall does."""
        site = tmp_path / folder
        module = distribution.replace("-", "_")
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[swapserve]\n{entry_point} = {module}\n")
        if source is not None:
            (site / f"{module}.py").write_text(source)
        return site

    return install


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model, made once."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder
