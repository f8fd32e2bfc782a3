"""Threads that wait in compiled code, so that waking them costs less than the work they are given.

A job is a task (machine code), a number of chunks, and words that tell the task where its arrays lie. Each thread has
its own stretch of the chunks, which it does in order, for memory is fastest when it is read in order; who is done with
its own takes from the others. The thread that brings a job works on it, too, and the job is done when each chunk is.
What a chunk is depends on the job alone, never on who takes it: results have the same bits for any number of threads.

Helpers look for chunks without pause for at most a millisecond after the last; then they sleep until somebody brings a
job again. A sleeping thread is woken, not waited for: whoever brought the job may have finished it by then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

import numpy as np

from kernels.cpu.jit import jit
from kernels.cpu.memory import call, fetch_add, read, relax, write

# Words of the control block; those that threads write lie on cache lines of their own. From LEFT on there is one such
# line per thread, which begins with how many chunks of its stretch are left.
DONE, STOP = 0, 16
TASK, CHUNKS, THREADS, JOB, LEFT = 32, 33, 34, 40, 256
LINE = 16

# Seconds that a thread without work looks for some before it sleeps.
PATIENCE = 1e-3


@jit
def _end(control: Any, thread: int) -> Any:
    """The chunk behind a thread's stretch."""
    return (thread + 1) * control[CHUNKS] // control[THREADS]


@jit
def work(control: Any, me: int) -> Any:
    """Do chunks of this thread's stretch, then of the others', until none is left; how many.

    A thread that comes too late finds nothing left. One that comes so late that the next job is there already gets a
    chunk of that: a job is never replaced before all its chunks are done.
    """
    done = 0
    for i in range(control[THREADS]):
        owner = (me + i) % control[THREADS]
        while True:
            left = fetch_add(control, LEFT + LINE * owner, -1)
            if left <= 0:
                break
            call(control[TASK], control, JOB, _end(control, owner) - left)
            done += 1
    fetch_add(control, DONE, done)
    return done


@jit
def run(control: Any, task: int, chunks: int) -> None:
    """Do a job whose words are in `control[JOB:]`, with whoever helps; it is done on return."""
    if chunks == 1:
        call(task, control, JOB, 0)
        return
    control[TASK], control[CHUNKS] = task, chunks
    write(control, DONE, 0)
    first = 0
    for thread in range(control[THREADS]):
        last = _end(control, thread)
        write(control, LEFT + LINE * thread, last - first)
        first = last
    work(control, 0)
    while read(control, DONE) < chunks:
        relax()


@jit
def run_alone(control: Any, task: int, chunks: int) -> None:
    """The same chunks, one after the other, in this thread: the slow twin of `run`, faster for small jobs."""
    for chunk in range(chunks):
        call(task, control, JOB, chunk)


@jit
def help_out(control: Any, me: int, patience: int) -> None:
    """Take chunks until there have been none for `patience` looks, or the pool is closed."""
    looks = 0
    while looks < patience and read(control, STOP) == 0:
        if read(control, LEFT + LINE * me) > 0 and work(control, me) > 0:
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
        self.shared = _Shared(threads)
        self.control = self.shared.control
        patience = _looks_per(PATIENCE) if threads > 1 else 0
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

    def __init__(self, threads: int) -> None:
        self.control = _control(threads)
        self._asleep: set[int] = set()
        self._gates = [threading.Lock() for _ in range(threads)]
        for gate in self._gates:
            gate.acquire()

    @property
    def asleep(self) -> int:
        """How many threads sleep."""
        return len(self._asleep)

    def sleep(self, me: int) -> None:
        """Until the next call of `wake`."""
        self._asleep.add(me)
        self._gates[me].acquire()
        self._asleep.discard(me)

    def wake(self) -> None:
        """Wake all threads that sleep."""
        for thread in tuple(self._asleep):
            with contextlib.suppress(RuntimeError):  # its gate is open already
                self._gates[thread].release()


def _control(threads: int) -> np.ndarray:
    """The control block: aligned, so that words meant for different cache lines lie on different ones."""
    n = LEFT + LINE * threads
    memory = np.zeros(n + LINE, dtype=np.int64)
    shift = (-memory.ctypes.data // 8) % LINE
    control = memory[shift : shift + n]
    control[THREADS] = threads
    return control


def _help(shared: _Shared, me: int, patience: int) -> None:
    while not shared.control[STOP]:
        help_out(shared.control, me, patience)
        shared.sleep(me)


def _close(shared: _Shared, helpers: list[threading.Thread]) -> None:
    shared.control[STOP] = 1
    for helper in helpers:
        while helper.is_alive() and helper is not threading.current_thread():
            shared.wake()
            helper.join(0.01)


def _looks_per(seconds: float) -> int:
    """How often a thread without work can look in so many seconds."""
    control, looks = _control(1), 2000
    help_out(control, 0, 1)
    start = time.perf_counter()
    help_out(control, 0, looks)
    return max(1, int(looks * seconds / (time.perf_counter() - start)))
