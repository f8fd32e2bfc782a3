"""Locks that are safe across fork().

`fork` copies a lock as it is, but of all threads only the one that forks. A lock that another thread holds would stay
locked in the child for ever, and what it protects might be half changed. So the thread that forks first acquires all
locks of this module, and both processes release them afterwards.

This serves programs that load a model and then fork: pre-forking web servers, and `multiprocessing` on Linux.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol, TypeVar

# Seconds that a fork waits for the locks of other threads: a lock of a backend is held for a forward pass.
PATIENCE = 10.0


class Lock(Protocol):
    """A `threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock."""


L = TypeVar("L", bound=Lock)

# Each lock, and whether a thread that holds it acquires further locks of this table.
_locks: weakref.WeakKeyDictionary[Lock, bool] = weakref.WeakKeyDictionary()
# Locks that a thread of the parent held for all of PATIENCE when this process was forked: they are never released here.
abandoned: weakref.WeakSet[Lock] = weakref.WeakSet()
_forking = threading.RLock()
_acquired: list[Lock] = []


def kept_over_forks(lock: L, *, is_outer: bool = False) -> L:
    """Return the lock, which is acquired before each fork from now on, for as long as it exists.

    A lock whose holder acquires others of these must be an outer one; a fork acquires outer locks first.
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
