"""The help is complete, grouped, and made from the settings."""

from __future__ import annotations

import re

from swapserve import __version__
from swapserve.config import Settings, flag_of


def test_every_setting_is_in_the_help_under_its_group(serve) -> None:
    shown = serve("--help", COLUMNS="100").stdout
    sections = dict(re.findall(r"^(\S[^\n]*):\n(.*?)(?=^\S|\Z)", shown, re.MULTILINE | re.DOTALL))
    for name, info in Settings.model_fields.items():
        if name != "model":
            assert f"--{name.replace('_', '-')}" in sections[flag_of(info).group], name
    assert "[MODEL]" in shown
    assert {"--config", "--print-config"} <= set(re.findall(r"--[a-z-]+", shown))
    assert "serve generate" in shown
    assert "serve plugins" in shown


def test_every_default_that_is_a_value_is_in_the_help(serve) -> None:
    shown = " ".join(serve("--help").stdout.split())
    for name, info in Settings.model_fields.items():
        if info.default not in (None, ()):
            assert f"[default: {info.default}]" in shown, name


def test_the_version_is_shown(serve) -> None:
    assert serve("--version").stdout.split()[-1] == __version__


def test_offline_generation_has_no_options_of_a_server(serve) -> None:
    shown = serve("generate", "--help").stdout
    assert "--port" not in shown
    assert "--kv-cache-memory-bytes" in shown
    assert "--max-tokens" in shown


def test_print_config_shows_what_is_in_force(serve) -> None:
    done = serve("--print-config", "./generate", "--no-enable-prefix-caching", SWAPSERVE_PORT="81")
    assert "model: ./generate" in done.stdout
    assert "kv: paged" in done.stdout
    assert "port: 81" in done.stdout
