"""GGUF files are unpacked once, whole or not at all, and say the same as transformers reads from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from swapserve import gguf_cache
from swapserve.executor import TorchExecutor
from swapserve.gguf_cache import ConversionError, _convert, cache_folder, unpack_gguf, unpacked_folder
from swapserve.model import ModelNotFound, load_model
from swapserve.params import SamplingParams
from swapserve.request import Request


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SWAPSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory):
    # Tests are imported by path, so a helper beside them is not a module they can name.
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from tiny_gguf import write_tiny_gguf
    finally:
        sys.path.pop(0)
    return write_tiny_gguf


def test_a_gguf_file_is_served_from_its_cache_with_transformers_tokens(tmp_path, cache, write_gguf, player):
    path = write_gguf(tmp_path / "tiny.gguf", add_bos=True)
    said: list[str] = []
    model = load_model(str(path), device="cpu", progress=said.append)
    assert any("unpacking" in line for line in said)
    assert [folder.name for folder in cache.iterdir()] == [unpacked_folder(path).name]  # nothing half-made beside it

    prompt = tuple(model.tokenizer("ab cd abc").input_ids)
    request = Request("r", prompt, SamplingParams(max_tokens=12, temperature=0.0), max_len=len(prompt) + 12)
    player(TorchExecutor(model, 16, 4), seed=0).play([request])
    options = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, **options)
    wanted = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
    )
    assert request.tokens == wanted[0].tolist()
    assert model.eos_token_ids == {2}

    said.clear()
    load_model(str(path), device="cpu", progress=said.append)
    assert not any("unpacking" in line for line in said)


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_h43_the_add_bos_flag_is_obeyed(add_bos, tmp_path, write_gguf):
    path = write_gguf(tmp_path / "tiny.gguf", add_bos)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    folder = unpacked_folder(path)
    folder.mkdir()
    _convert(path, folder)
    ours = load_model(str(path), device="cpu").tokenizer
    for text in ("ab cd", "", "hab"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert (ours("ab").input_ids[0] == 1) is (add_bos is not False)


def test_another_file_under_the_same_name_is_unpacked_anew(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "tiny.gguf", add_bos=True)
    before = unpacked_folder(path)
    write_gguf(path, add_bos=False)  # of the same size
    assert unpacked_folder(path) != before


def test_a_file_that_is_no_gguf_gives_one_sentence_and_leaves_nothing(tmp_path, cache):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ConversionError, match=r"bad\.gguf could not be unpacked"):
        unpack_gguf(path, lambda message: None)
    assert list(cache.iterdir()) == []


def test_what_a_killed_unpacking_left_is_removed_and_what_a_running_one_holds_is_kept(tmp_path, cache, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = cache_folder()
    (folder / f".partial-{ended.pid}-x").mkdir()
    (folder / f".partial-{os.getpid()}-x").mkdir()
    monkeypatch.setattr(gguf_cache, "_convert_apart", lambda source, target, progress: (target / "done").touch())
    path = tmp_path / "any.gguf"
    path.touch()
    made = unpack_gguf(path, lambda message: None)
    assert (made / "done").exists()
    assert sorted(entry.name for entry in folder.iterdir()) == sorted([f".partial-{os.getpid()}-x", made.name])


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SWAPSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "swapserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "swapserve"


def test_a_gguf_that_is_not_there_gives_one_sentence(tmp_path):
    with pytest.raises(ModelNotFound, match="there is no file or folder"):
        load_model(str(tmp_path / "none.gguf"))
