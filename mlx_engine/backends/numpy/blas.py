"""Limit BLAS to one thread. The limit is process-wide, so overlapping sessions share it and the last restores it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

from mlx_engine.machine.forks import kept_over_forks

_lock = kept_over_forks(threading.Lock())
_held = 0
_limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread: the first caller to enter sets the limit, the last to leave restores the old one."""
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
    """Return the BLAS libraries of this process. Cached: the search takes milliseconds."""
    return ThreadpoolController()
