"""Time as the engine sees it, so that the same engine runs on a virtual clock in a test or a simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything with a `now()` in seconds that never goes backwards."""

    def now(self) -> float:
        """Seconds since some fixed moment."""


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told: for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (at least 0)."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s: give a number of seconds that is at least 0")
        self._now += seconds
