"""BLAS on one thread. The limit belongs to the process, so sessions that overlap must agree on who lifts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_held = 0
_limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread; the first to enter sets the limit, the last to leave restores what was."""
    global _held, _limit
    with _lock:
        if _held == 0:
            _limit = _libraries().limit(limits=1)
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if _held == 0:
                _limit.restore_original_limits()


@cache
def _libraries() -> ThreadpoolController:
    """The BLAS libraries of this process; looking for them costs milliseconds."""
    return ThreadpoolController()
