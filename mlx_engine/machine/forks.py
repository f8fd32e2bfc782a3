"""Locks that are safe across fork().

`fork` copies every lock in its current state, but only the calling thread. A lock that another thread holds would stay
locked in the child process for ever, and the data that it protects might be inconsistent. So the thread that forks
first acquires all locks of this module, and both processes release them afterwards.

This serves programs that load a model and then fork: pre-forking web servers, and `multiprocessing` on Linux.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol, TypeVar

# Seconds that a fork waits for the locks of other threads. A thread holds the lock of a backend for a forward pass.
PATIENCE = 10.0


class Lock(Protocol):
    """A `threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock."""


L = TypeVar("L", bound=Lock)

# Each lock, and whether it is an outer lock: its holder may acquire further locks of this table.
_locks: weakref.WeakKeyDictionary[Lock, bool] = weakref.WeakKeyDictionary()
# Locks that a thread of the parent did not release within PATIENCE before the fork; this process never releases them.
abandoned: weakref.WeakSet[Lock] = weakref.WeakSet()
_forking = threading.RLock()
_acquired: list[Lock] = []


def kept_over_forks(lock: L, *, is_outer: bool = False) -> L:
    """Register a lock to be acquired before each fork, for as long as the lock exists; return the lock.

    Set `is_outer` if a thread that holds the lock acquires other registered locks; a fork acquires outer locks first.
    """
    _locks[lock] = is_outer
    return lock


def _acquire_all() -> None:
    _forking.acquire()
    deadline = time.monotonic() + PATIENCE
    for lock, _ in sorted(_locks.items(), key=lambda of: not of[1]):
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _acquired.append(lock)


def _release_all() -> None:
    for lock in _acquired:
        lock.release()
    _acquired.clear()
    _forking.release()


def _release_all_in_child() -> None:
    abandoned.update(lock for lock in _locks if lock not in _acquired)
    _release_all()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all_in_child)
