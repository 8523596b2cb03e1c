"""Distributions as an installer sees them: built to wheels, and installed where nothing else of this project is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DISTRIBUTIONS = {
    "swapserve": ROOT / "core",
    "swapserve-kernels": ROOT / "kernels",
    **{
        f"swapserve-{kind}-{name}": ROOT / "plugins" / folder / name
        for kind, folder, names in (
            ("scheduler", "schedulers", ("static", "continuous", "chunked")),
            ("kv", "kv_managers", ("contiguous", "paged", "prefix")),
            ("speculator", "speculators", ("ngram", "draft")),
        )
        for name in names
    },
}
"""The ten distributions and their folders."""


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds the wheel of a folder, once."""
    made: dict[Path, Path] = {}

    def build(folder: Path) -> Path:
        if folder not in made:
            target = tmp_path_factory.mktemp("wheel")
            command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            [made[folder]] = target.glob("*.whl")
        return made[folder]

    return build


@dataclass(frozen=True)
class Elsewhere:
    """A Python with all that this project needs from others, and none of the project's own working copies."""

    python: Path

    def install(self, wheel: Path, folder: Path) -> None:
        """Install a wheel into a folder, to be named on PYTHONPATH."""
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(folder)]
        command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *words: str, path: Sequence[Path]) -> str:
        """What Python prints, with some folders of installed wheels."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SWAPSERVE_")}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([str(self.python), *words], capture_output=True, text=True, env=environment, cwd=path[0])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """A virtual environment that sees this one's packages, but for the project's own.

    Installing torch again would take minutes; links take none. Files named *.pth are left out: they are what makes a
    working copy importable.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().startswith("swapserve") and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return Elsewhere(python)
