"""How long tests wait for what must happen: long, because machines are busy. A wait ends when it has happened."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds. What takes a second on a quiet machine takes half a minute on one whose cores many processes share.
PATIENCE = 120.0


def wait_for(holds: Callable[[], object], pause: float = 0.002) -> None:
    """Wait until something holds, which is looked at after each pause in seconds; fail when patience ends."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "expected this to hold by now"
        time.sleep(pause)
