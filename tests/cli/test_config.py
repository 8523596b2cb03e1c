"""Where a setting's value comes from, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from swapserve.config import Settings, SettingsError, Source, load_settings, merge


def load(flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, config: str | None = None):
    return load_settings(flags or {}, environment or {}, config)


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nhost: 0.0.0.1\nseed: 1\nmax-num-seqs: 5\n")
    settings = load({"port": "3"}, {"SWAPSERVE_PORT": "2", "SWAPSERVE_HOST": "0.0.0.2"}, str(file))
    assert (settings.port, settings.host, settings.seed) == (3, "0.0.0.2", 1)
    assert settings.max_num_seqs == 5
    assert settings.max_num_batched_tokens == Settings().max_num_batched_tokens


def test_what_print_config_shows_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    settings = load(
        {"kv_cache_memory_bytes": "2GiB", "served_model_name": ("a", "b"), "scheduler": "chunked,chunk_size=64",
         "block_size": "8", "enable_prefix_caching": False}
    )  # fmt: skip
    file = tmp_path / "printed.yaml"
    file.write_text(settings.lines())
    assert load(config=str(file)) == settings
    assert settings.kv == "paged,block_size=8"


def test_the_api_key_is_never_printed() -> None:
    assert "hunter2" not in load({"api_key": "hunter2"}).lines()


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("512MB", 512_000_000), ("4096", 4096)])
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert load({"kv_cache_memory_bytes": text}).kv_cache_memory_bytes == size


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({}, ("chunked", "prefix", "none")),
        ({"enable_prefix_caching": False}, ("chunked", "paged", "none")),
        ({"enable_chunked_prefill": False}, ("continuous", "prefix", "none")),
        ({"enable_chunked_prefill": False, "scheduler": "static"}, ("static", "prefix", "none")),
        ({"kv": "contiguous", "enable_prefix_caching": False}, ("chunked", "contiguous", "none")),
        ({"kv": "prefix,block_size=4", "enable_prefix_caching": True}, ("chunked", "prefix,block_size=4", "none")),
        ({"block_size": "32"}, ("chunked", "prefix,block_size=32", "none")),
        ({"block_size": "32", "kv": "paged,block_size=32"}, ("chunked", "paged,block_size=32", "none")),
        (
            {"speculative_config": '{"model": "tiny", "num_speculative_tokens": 3}'},
            ("chunked", "prefix", "draft,model=tiny,num_speculative_tokens=3"),
        ),
    ],
)
def test_other_names_choose_the_policy_they_stand_for(flags: dict[str, Any], chosen: tuple[str, str, str]) -> None:
    settings = load(flags)
    assert (settings.scheduler, settings.kv, settings.speculator) == chosen


@pytest.mark.parametrize(
    "flags",
    [
        {"kv": "paged", "enable_prefix_caching": True},
        {"kv": "prefix", "enable_prefix_caching": False},
        {"scheduler": "static", "enable_chunked_prefill": True},
        {"kv": "paged,block_size=4", "block_size": "8"},
        {"speculator": "none", "speculative_config": '{"method": "ngram"}'},
    ],
)
def test_two_names_that_contradict_each_other_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="was given too: leave one of them out"):
        load(flags)


def test_of_two_names_from_different_places_the_stronger_place_wins() -> None:
    assert load({"kv": "paged"}, {"SWAPSERVE_ENABLE_PREFIX_CACHING": "1"}).kv == "paged"
    assert load({"enable_prefix_caching": True}, {"SWAPSERVE_KV": "paged"}).kv == "prefix"
    assert load({"block_size": "8"}, {"SWAPSERVE_KV": "paged,block_size=4"}).kv == "paged,block_size=8"
    assert load({"kv": "paged,block_size=4"}, {"SWAPSERVE_BLOCK_SIZE": "8"}).kv == "paged,block_size=4"


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ({"port": "http"}, {}, ["--port", "integer", "'http'"]),
        ({"dtype": "float8"}, {}, ["--dtype", "'float32'", "'bfloat16'", "'float8'"]),
        ({"device": "gpu"}, {}, ["--device", "auto|cpu|cuda"]),
        ({"max_num_seqs": "0"}, {}, ["--max-num-seqs", "greater than or equal to 1"]),
        ({"kv_cache_memory_bytes": "2 pints"}, {}, ["--kv-cache-memory-bytes", "pints"]),
        ({"speculative_config": "{"}, {}, ["--speculative-config", "not JSON"]),
        ({"speculative_config": '{"method": "eagle"}'}, {}, ["eagle", "ngram", "draft_model"]),
        ({"speculative_config": '{"method": "ngram", "k": 2}'}, {}, ["'k'", "prompt_lookup_max"]),
        ({"scheduler": "chunked,64"}, {}, ["--scheduler", "'64'", "key=value"]),
        # Kubernetes sets such a variable for a service of our name.
        ({}, {"SWAPSERVE_PORT": "tcp://10.0.0.1:80"}, ["SWAPSERVE_PORT", "integer"]),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_it_was_given_under(
    flags: dict[str, Any], environment: dict[str, str], says: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags, environment)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in says if part not in message] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_seqs: 3\n", ["'max_seqs'", "max-num-seqs", "scheduler"]),
        ("port: eight\n", ["port in", "integer"]),
        ("- port\n", ["key: value"]),
        ("port: [\n", ["not YAML"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", ["given twice"]),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: list[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(config=str(file))
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in [str(file), *says] if part not in message] == []


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*none\.yaml: No such file"):
        load(config=str(tmp_path / "none.yaml"))


def test_an_argument_of_the_library_that_is_no_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"there is no setting 'schedular'; there are: .*scheduler"):
        merge([Source({"schedular": "chunked"}, "argument")])


def test_every_setting_says_what_it_is_for() -> None:
    for name, info in Settings.model_fields.items():
        assert info.description, name
    assert yaml.safe_load(Settings().lines())["scheduler"] == "chunked"
