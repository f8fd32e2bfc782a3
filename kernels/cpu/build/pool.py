"""The pool of worker threads. `jobs.py` defines their jobs, which are divided into chunks.

After its last chunk, a worker thread polls for new chunks for PATIENCE seconds, in compiled code. Then the thread
parks: it blocks until `wake` is called. Threads do not park at once, because waking one takes longer than a small job.
While the control word ON is 1, more jobs follow, and no thread parks. The thread that submits a job calls `wake` before
the job but does not wait for the parked threads, so the job may be finished before they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref

import numpy as np

from .layout import LEFT, LINE, ON, SCRATCH, SCRATCH_BYTES, SLEEP, SPINS, STOP, THREADS
from .library import Library

PATIENCE = 1e-3
# After this number of seconds without work, a thread sleeps between polls, so that other processes get the core. Two
# processes on two cores then decode 1.5 times as fast (0.6B, Q8_0), and a single process is not slower.
SPIN_SECONDS = 5e-5


class Pool:
    """A pool of `threads` threads, including the one that submits jobs. Only one thread at a time may submit a job."""

    def __init__(self, threads: int, library: Library) -> None:
        if threads < 1:
            raise ValueError(f"a pool: expected at least one thread, found {threads}")
        self.threads, self._library = threads, library
        self._start()

    def renew(self) -> None:
        """Start the threads again if this process is a fork of the one that started them: fork does not copy threads.

        No job may have been running at the time of the fork.
        """
        if self._process != os.getpid():
            self.close.detach()
            self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self.shared = _Shared(self.threads, self._library)
        self.control = self.shared.control
        self.address = self.control.ctypes.data
        polls = self.shared.polls_per_second() if self.threads > 1 else 0.0
        self.control[SPINS], patience = max(1, int(polls * SPIN_SECONDS)), max(1, int(polls * PATIENCE))
        self._workers = [
            threading.Thread(
                target=_run_worker, args=(self.shared, me, patience), name="mlx_engine-worker", daemon=True
            )
            for me in range(1, self.threads)
        ]
        for worker in self._workers:
            worker.start()
        # The finalizer also runs at exit of the interpreter, before the memory that the threads read is freed.
        self.close = weakref.finalize(self, _close, self.shared, self._workers)


class _Shared:
    """The memory that the threads share. It has no reference to the pool, so that the pool can be garbage-collected.

    Attributes:
        parked: the numbers of the parked threads. A thread that has been woken removes its number. So if Ctrl-C
            interrupts `wake`, the next call of `wake` wakes the remaining threads. Waking a thread twice does no harm.
    """

    def __init__(self, threads: int, library: Library) -> None:
        self.work_until_idle = library.work_until_idle
        self.control = _aligned(LEFT + LINE * threads)
        # The operating system allocates a page of this memory only when the page is written.
        self._scratch = _aligned((threads + 1) * SCRATCH_BYTES // 8)
        self.control[THREADS], self.control[SCRATCH] = threads, self._scratch.ctypes.data
        self._system = ctypes.CDLL(None)  # a reference, so that the address of usleep stays valid
        self.control[SLEEP] = ctypes.cast(self._system.usleep, ctypes.c_void_p).value
        self.parked: set[int] = set()
        self._gates = [threading.Lock() for _ in range(threads)]
        for gate in self._gates:
            gate.acquire()

    def polls_per_second(self) -> float:
        """Measure how often per second a thread without work polls; return the largest of three measurements."""
        polls, least = 2000, float("inf")
        self.control[SPINS] = polls + 1  # so that the measured polls do not sleep
        for _ in range(3):  # a measurement may be interrupted by another process
            start = time.perf_counter()
            self.work_until_idle(self.control.ctypes.data, 0, polls)
            least = min(least, time.perf_counter() - start)
        return polls / least

    def park(self, me: int) -> None:
        """Block until the next call of `wake`. If ON is 1, return at once: more jobs follow without another `wake`."""
        # Add the thread to `parked` before ON is checked, so that a `wake` after the check wakes this thread.
        self.parked.add(me)
        if not self.control[ON]:
            self._gates[me].acquire()
        self.parked.discard(me)

    def wake(self) -> None:
        """Wake all parked threads."""
        for thread in tuple(self.parked):
            with contextlib.suppress(RuntimeError):  # the lock is not held: the thread has been woken already
                self._gates[thread].release()


def _aligned(n: int) -> np.ndarray:
    """Return `n` int64 zeros, aligned to LINE words, so that the words of two threads share no cache line."""
    memory = np.zeros(n + LINE, dtype=np.int64)
    shift = (-memory.ctypes.data // 8) % LINE
    return memory[shift : shift + n]


def _run_worker(shared: _Shared, me: int, patience: int) -> None:
    address = shared.control.ctypes.data
    while not shared.control[STOP]:
        shared.work_until_idle(address, me, patience)
        shared.park(me)


def _close(shared: _Shared, workers: list[threading.Thread]) -> None:
    shared.control[STOP] = 1
    for worker in workers:
        while worker.is_alive() and worker is not threading.current_thread():
            shared.wake()
            worker.join(0.01)
