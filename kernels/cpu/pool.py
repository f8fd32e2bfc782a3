"""Threads that wait in compiled code, so that waking them costs less than the work they are given.

A job is a task (machine code), a number of chunks, and words that tell the task where its arrays lie. The thread that
brings a job works on it, too: every thread takes the next chunk until there is none, and the job is done when each
chunk is. What a chunk is depends on the job alone, never on who takes it, so results have the same bits for any number
of threads.

The other threads look for chunks without pause for at most a millisecond after the last; then they sleep until somebody
brings a job again. A sleeping thread is woken, not waited for: whoever brought the job may have finished it by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np

from kernels.cpu.jit import jit
from kernels.cpu.memory import call, fetch_add, read, relax, write

# Words of the control block; those that threads write lie on cache lines of their own.
LEFT, DONE, STOP = 0, 16, 32
TASK, CHUNKS, JOB = 48, 49, 50
WORDS = 256

# Seconds that a thread without work looks for some before it sleeps.
PATIENCE = 1e-3


@jit
def work(control: Any) -> int:
    """Do chunks until none is left; how many.

    A thread that comes too late finds LEFT at 0 or below. One that comes so late that the next job is there already
    gets a chunk of that: a job is never replaced before all its chunks are done.
    """
    done = 0
    while True:
        left = fetch_add(control, LEFT, -1)
        if left <= 0:
            fetch_add(control, DONE, done)
            return done
        call(control[TASK], control, JOB, control[CHUNKS] - left)
        done += 1


@jit
def run(control: Any, task: int, chunks: int) -> None:
    """Do a job whose words are in `control[JOB:]`, with whoever helps; it is done on return."""
    control[TASK], control[CHUNKS] = task, chunks
    if chunks == 1:
        call(task, control, JOB, 0)
        return
    write(control, DONE, 0)
    write(control, LEFT, chunks)
    work(control)
    while read(control, DONE) < chunks:
        relax()


@jit
def run_alone(control: Any, task: int, chunks: int) -> None:
    """The slow twin of `run`: the same chunks, one after the other, in this thread."""
    for chunk in range(chunks):
        call(task, control, JOB, chunk)


@jit
def help_out(control: Any, patience: int) -> None:
    """Take chunks until there have been none for `patience` looks, or the pool is closed."""
    looks = 0
    while looks < patience and read(control, STOP) == 0:
        if read(control, LEFT) > 0 and work(control) > 0:
            looks = 0
        else:
            relax()
            looks += 1


class Pool:
    """`threads` threads, of which the calling one is the first. One job at a time: callers take turns."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool: expected at least one thread, found {threads}")
        self.threads = threads
        self.shared = _Shared()
        self.control = self.shared.control
        patience = _looks_per(PATIENCE) if threads > 1 else 0
        self._helpers = [
            threading.Thread(target=_help, args=(self.shared, patience), name="mlx_engine-helper", daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in self._helpers:
            helper.start()
        # Also called when the interpreter ends, before the memory that the threads read is gone.
        self.close = weakref.finalize(self, _close, self.shared, self._helpers)


class _Shared:
    """What the threads know: the pool's memory, but not the pool, which may end before them."""

    def __init__(self) -> None:
        # Aligned, so that words meant for different cache lines lie on different ones.
        memory = np.zeros(WORDS + 16, dtype=np.int64)
        shift = (-memory.ctypes.data // 8) % 16
        self.control = memory[shift : shift + WORDS]
        self.asleep = 0
        self._lock, self._gate = threading.Lock(), threading.Semaphore(0)

    def sleep(self) -> None:
        """Until the next call of `wake`."""
        with self._lock:
            self.asleep += 1
        self._gate.acquire()

    def wake(self) -> None:
        """Wake all threads that sleep."""
        with self._lock:
            n, self.asleep = self.asleep, 0
        if n:
            self._gate.release(n)


def _help(shared: _Shared, patience: int) -> None:
    while not shared.control[STOP]:
        help_out(shared.control, patience)
        shared.sleep()


def _close(shared: _Shared, helpers: list[threading.Thread]) -> None:
    shared.control[STOP] = 1
    for helper in helpers:
        while helper.is_alive() and helper is not threading.current_thread():
            shared.wake()
            helper.join(0.01)


def _looks_per(seconds: float) -> int:
    """How often a thread without work can look in so many seconds."""
    control, looks = np.zeros(WORDS, dtype=np.int64), 2000
    help_out(control, 1)
    start = time.perf_counter()
    help_out(control, looks)
    return max(1, int(looks * seconds / (time.perf_counter() - start)))
