"""Threads that wait in compiled code, so that waking them costs less than the work they are given. See `jobs.py`.

Helpers look for chunks without pause for at most a millisecond after the last, or the last of several jobs; then they
sleep until somebody brings a job again. A sleeping thread is woken, not waited for: whoever brought the job may have
finished it by then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import numpy as np

from kernels.cpu.layout import LEFT, LINE, ON, SCRATCH, SCRATCH_BYTES, STOP, THREADS
from kernels.cpu.library import Library

# Seconds that a thread without work looks for some before it sleeps.
PATIENCE = 1e-3


class Pool:
    """`threads` threads, of which the calling one is the first. One job at a time: callers take turns."""

    def __init__(self, threads: int, library: Library) -> None:
        if threads < 1:
            raise ValueError(f"a pool: expected at least one thread, found {threads}")
        self.threads = threads
        self.shared = _Shared(threads, library)
        self.control = self.shared.control
        self.address = self.control.ctypes.data
        patience = self.shared.looks_per(PATIENCE) if threads > 1 else 0
        self._helpers = [
            threading.Thread(target=_help, args=(self.shared, me, patience), name="mlx_engine-helper", daemon=True)
            for me in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()
        # Also called when the interpreter ends, before the memory that the threads read is gone.
        self.close = weakref.finalize(self, _close, self.shared, self._helpers)


class _Shared:
    """What the threads know: the pool's memory, but not the pool, which may end before them.

    Ctrl-C may come between any two steps of whoever wakes. So a thread counts as asleep until it says itself that it
    is not, and is woken again by the next call if the last one was cut short; once too often does no harm.
    """

    def __init__(self, threads: int, library: Library) -> None:
        self.help_out = library.help_out
        self.control = _aligned(LEFT + LINE * threads)
        # Pages that nobody touches cost nothing.
        self._scratch = _aligned((threads + 1) * SCRATCH_BYTES // 8)
        self.control[THREADS], self.control[SCRATCH] = threads, self._scratch.ctypes.data
        self._asleep: set[int] = set()
        self._gates = [threading.Lock() for _ in range(threads)]
        for gate in self._gates:
            gate.acquire()

    def looks_per(self, seconds: float) -> int:
        """How often a thread without work can look in so many seconds."""
        looks = 2000
        start = time.perf_counter()
        self.help_out(self.control.ctypes.data, 0, looks)
        return max(1, int(looks * seconds / (time.perf_counter() - start)))

    @property
    def asleep(self) -> int:
        """How many threads sleep."""
        return len(self._asleep)

    def sleep(self, me: int) -> None:
        """Until the next call of `wake`; not at all while many jobs are about to come, for which nobody wakes again."""
        self._asleep.add(me)  # first: whoever brings jobs from now on sees it
        if not self.control[ON]:
            self._gates[me].acquire()
        self._asleep.discard(me)

    def wake(self) -> None:
        """Wake all threads that sleep."""
        for thread in tuple(self._asleep):
            with contextlib.suppress(RuntimeError):  # its gate is open already
                self._gates[thread].release()


def _aligned(n: int) -> np.ndarray:
    """`n` words from the beginning of a cache line on, so that words lie on the lines that they are meant for."""
    memory = np.zeros(n + LINE, dtype=np.int64)
    shift = (-memory.ctypes.data // 8) % LINE
    return memory[shift : shift + n]


def _help(shared: _Shared, me: int, patience: int) -> None:
    address = shared.control.ctypes.data
    while not shared.control[STOP]:
        shared.help_out(address, me, patience)
        shared.sleep(me)


def _close(shared: _Shared, helpers: list[threading.Thread]) -> None:
    shared.control[STOP] = 1
    for helper in helpers:
        while helper.is_alive() and helper is not threading.current_thread():
            shared.wake()
            helper.join(0.01)
