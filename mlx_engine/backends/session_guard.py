"""The guard of a backend's sessions, the `with` blocks in which forward passes run (`Backend.session`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mlx_engine.errors import BackendUnavailableError, ClosedError
from mlx_engine.machine.forks import abandoned, kept_over_forks


class SessionGuard:
    """Refuses sessions that are not possible (`check`), and lets one thread at a time hold a session (`held`).

    Copies of a backend share the guard of the original.
    """

    def __init__(self, name: str, *, survives_fork: bool = True) -> None:
        # The id of the only process in which sessions are possible; None if forked processes can have sessions, too.
        self._name, self._process = name, None if survives_fork else os.getpid()
        self._lock, self._is_closed = threading.RLock(), False
        if survives_fork:
            kept_over_forks(self._lock, is_outer=True)

    def check(self) -> None:
        """Raise an error if no session is possible.

        Raises:
            ClosedError: the backend has been closed.
            BackendUnavailableError: this process was forked, and the backend does not work here.
        """
        if self._is_closed:
            raise ClosedError
        if self._process not in (None, os.getpid()):
            raise BackendUnavailableError(
                name=self._name,
                reason="this process was forked from the process that made the engine, and has none of MLX's threads",
                hint="load the model in this process, or start the process by 'spawn' in place of 'fork'",
            )
        if self._lock in abandoned:
            raise BackendUnavailableError(
                name=self._name,
                reason="this process was forked while another thread was in a long forward pass",
                hint="fork between passes, or load the model in this process",
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other thread holds a session, then hold one in the `with` block. A thread may nest the blocks.

        Raises:
            ClosedError, BackendUnavailableError: see `check`.
        """
        self.check()
        with self._lock:
            self.check()  # another thread may have closed the backend while this thread waited
            yield

    @contextmanager
    def close(self) -> Iterator[None]:
        """Refuse all later sessions, and wait until the current session ends before the `with` block begins."""
        self._is_closed = True
        # In a forked process, a thread of the parent process may hold the lock, and would never release it here.
        is_lost = self._process not in (None, os.getpid()) or self._lock in abandoned
        with nullcontext() if is_lost else self._lock:
            yield

    def hold_for_ever(self, seconds: float) -> bool:
        """Hold the session until the process ends, so that no other thread runs a pass during the exit; return True.

        Return False, without the session, if another thread does not end its session within the given seconds, or if
        this process was forked and the backend does not work here.
        """
        return self._process in (None, os.getpid()) and self._lock.acquire(timeout=seconds)
