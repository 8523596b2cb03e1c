"""How threads wait for each other, settled before torch is loaded.

A step has hundreds of short parallel sections, in torch's OpenMP pool and in numba's. By default a thread that waits
spins, for about a millisecond, on a core that the other pool, the HTTP server or another program may need: on a
busy machine steps then take five to ten times as long. A short spin keeps most of the speed of an idle machine.
"""

from __future__ import annotations

import os
import sys

SPINS = "50000"
"""Rounds of spinning before a thread sleeps, some 0.2 ms: an idle machine loses nothing, and a busy one little."""


PRIMITIVES = "128"
"""Products oneDNN keeps ready, one a shape: enough for steps of some sixteen sizes. Its own default of 1,024 grows to
half a gigabyte as requests of all lengths come."""


def wait_politely() -> bool:
    """Make waiting OpenMP threads sleep soon and oneDNN keep less, unless the environment says otherwise.

    False, and nothing done, once torch is loaded: OpenMP reads its settings when it is.
    """
    if "torch" in sys.modules:
        return False
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    return True
