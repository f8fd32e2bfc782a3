"""Make locks safe across fork(), for programs that load a model and then fork, such as pre-forking web servers.

The child process has a copy of every lock, locked or not, but of the threads only the one that called `fork`. If
another thread held a lock, the lock would stay locked in the child process forever, and the data that the lock guards
might be inconsistent. So before each fork, the forking thread acquires all locks that are registered here; after the
fork, both processes release the locks.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol, TypeVar

# Seconds that a fork waits for all locks together; long, because a thread holds a backend's lock for a whole pass.
PATIENCE = 10.0


class Lock(Protocol):
    """A `threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return whether it was acquired."""

    def release(self) -> None:
        """Release the lock."""


L = TypeVar("L", bound=Lock)

# Maps each registered lock to whether it is an outer lock (see `kept_over_forks`).
_locks: weakref.WeakKeyDictionary[Lock, bool] = weakref.WeakKeyDictionary()
# In a child process: locks that a thread of the parent still held after PATIENCE. They stay locked in the child.
abandoned: weakref.WeakSet[Lock] = weakref.WeakSet()
_forking = threading.RLock()
_acquired: list[Lock] = []


def kept_over_forks(lock: L, *, is_outer: bool = False) -> L:
    """Register a lock to be acquired before each fork, and return it. The registry has only a weak reference to it.

    Set `is_outer` if a thread that holds the lock may acquire other registered locks. To avoid deadlocks, a fork
    acquires outer locks first.
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
