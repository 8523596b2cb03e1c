"""Each of the ten distributions builds to a wheel that installs and loads on its own."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import DISTRIBUTIONS, Elsewhere

POLICIES = [name for name in DISTRIBUTIONS if name.count("-") == 2]

SHOW_POLICY = """
import sys
from swapserve import Plugins
kind, name = sys.argv[1:]
plugins = Plugins()
policy = plugins.policy(kind, name)
print(policy.name, policy.__module__, sys.modules[policy.__module__].__file__)
print(sorted(record.distribution for record in plugins.records))
"""


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_wheel_holds_modules_and_no_tests(distribution: str, build_wheel: Callable[[Path], Path]) -> None:
    wheel = build_wheel(DISTRIBUTIONS[distribution])
    module = distribution.replace("-", "_")
    assert wheel.name.startswith(f"{module}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name in (f"{module}.py", f"{module}/__init__.py") for name in names)
    assert [name for name in names if Path(name).name.startswith(("test_", "conftest"))] == []


@pytest.mark.parametrize("distribution", POLICIES)
def test_a_policy_installs_alone_beside_core_and_is_found_by_name(
    distribution: str, build_wheel: Callable[[Path], Path], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    _, kind, name = distribution.split("-")
    core, plugin = tmp_path / "core", tmp_path / "plugin"
    elsewhere.install(build_wheel(DISTRIBUTIONS["swapserve"]), core)
    elsewhere.install(build_wheel(DISTRIBUTIONS[distribution]), plugin)
    found, distributions = elsewhere.run("-c", SHOW_POLICY, kind, name, path=[core, plugin]).splitlines()
    assert found.split() == [name, distribution.replace("-", "_"), str(plugin / f"{distribution.replace('-', '_')}.py")]
    assert distributions == str(sorted(["swapserve", distribution]))


def test_core_installs_without_any_plugin_and_says_so(
    build_wheel: Callable[[Path], Path], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    core = tmp_path / "core"
    elsewhere.install(build_wheel(DISTRIBUTIONS["swapserve"]), core)
    assert "version 0.1.0" in elsewhere.run("-m", "swapserve.cli", "--version", path=[core])
    listing = elsewhere.run("-m", "swapserve.cli", "plugins", path=[core]).splitlines()
    assert [line.split()[:2] for line in listing[1:]] == [["speculator", "none"]]


def test_kernels_install_alone(build_wheel: Callable[[Path], Path], elsewhere: Elsewhere, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    elsewhere.install(build_wheel(DISTRIBUTIONS["swapserve-kernels"]), kernels)
    shown = elsewhere.run("-c", "import swapserve_kernels as k; print(k.__file__)", path=[kernels])
    assert shown.startswith(str(kernels))
