"""GGUF files are unpacked once into a folder of plain float32 safetensors, and served from that folder.

Unpacking takes a minute and several times the memory of the weights, so it runs in a process of its own and its
result is kept: `$SWAPSERVE_CACHE`, else `$XDG_CACHE_HOME/swapserve`, else `~/.cache/swapserve`. A folder appears
there whole or not at all: it is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swapserve.model_errors import ModelError

Progress = Callable[[str], None]

PARTIAL = ".partial-"
FORMAT = 1
"""Part of every folder's name: a change of what is written here makes old folders unused, not misread."""


class ConversionError(ModelError):
    """A GGUF file could not be unpacked; the message says why."""


def cache_folder() -> Path:
    """Where unpacked models and the demo model are kept; made when it is not there."""
    chosen = os.environ.get("SWAPSERVE_CACHE")
    if not chosen:
        parent = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        chosen = os.path.join(parent, "swapserve")
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def unpacked_folder(source: Path) -> Path:
    """The folder that holds `source` unpacked, whether or not it is there yet.

    Its name follows the file's path, size and time of change: hashing the contents of a large file would cost
    seconds at every start.
    """
    file = source.resolve()
    facts = file.stat()
    key = hashlib.sha256(f"{FORMAT}\0{file}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_folder() / f"{source.stem}-{key}"


def unpack_gguf(source: Path, progress: Progress) -> Path:
    """Return the folder with `source` unpacked, making it first if need be; raises `ConversionError`."""
    target = unpacked_folder(source)
    if target.is_dir():
        return target
    progress(f"unpacking {source.name} into {target} (once; about a minute)")
    _remove_abandoned(target.parent)
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{os.getpid()}-", dir=target.parent))
    folder = partial / "model"  # its permissions are the ordinary ones, where mkdtemp's are the owner's alone
    folder.mkdir()
    try:
        _convert_apart(source, folder, progress)
        _publish(folder, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert_apart(source: Path, folder: Path, progress: Progress) -> None:
    """Convert in another process: the memory it takes is given back whole."""
    command = [sys.executable, "-m", "swapserve.gguf_cache", str(source.resolve()), str(folder)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            progress(line.rstrip())
        if child.wait() != 0:
            complaints.seek(0)
            said = complaints.read().strip().splitlines() or [f"the unpacking process ended with {child.returncode}"]
            raise ConversionError(f"{source} could not be unpacked: {said[-1]}")


def _remove_abandoned(cache: Path) -> None:
    """Remove what unpackings that were killed left behind."""
    for partial in cache.glob(f"{PARTIAL}*"):
        owner = partial.name.removeprefix(PARTIAL).split("-")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(partial, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _publish(partial: Path, target: Path) -> None:
    """Rename a complete folder to its final name; another process may have been first, with the same contents."""
    try:
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():
            raise


def _convert(source: Path, folder: Path) -> None:
    """Write `source` as float32 safetensors with config, generation config and tokenizer into `folder`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    where: dict[str, str] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    print("reading the tokenizer", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)
    print("unpacking the weights", flush=True)
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # without it, transformers always unpacks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **options)
    # The weights are plain floats now, but the loader's mark on the model makes saving refuse.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    print("writing the folder", flush=True)
    model.save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
