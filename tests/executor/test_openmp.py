"""The way threads wait is set before torch is loaded, and only where the user has not set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "before", "wanted"),
    [
        ({}, "", "True 50000"),
        ({"GOMP_SPINCOUNT": "7"}, "", "True 7"),
        ({"OMP_WAIT_POLICY": "active"}, "", "True None"),
        ({}, "import sys; sys.modules['torch'] = None; ", "False None"),
    ],
)
def test_spinning_is_cut_short_unless_the_user_says_otherwise(given, before, wanted):
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = before + "import os; from swapserve.openmp import wait_politely; "
    script += "print(wait_politely(), os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", script], env=plain | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == wanted
