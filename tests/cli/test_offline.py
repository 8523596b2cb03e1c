"""Generation without a server: the Python API and `serve generate`."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
