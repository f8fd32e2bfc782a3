"""Jobs: chunks of work that several threads take from each other. `pool.py` has the threads.

A job is a task (machine code), a number of chunks, and words that tell the task where its arrays lie. Each thread has
its own stretch of the chunks, which it does in order, for memory is fastest when it is read in order; who is done with
its own takes from the others. The thread that brings a job works on it, too, and the job is done when each chunk is.
What a chunk is depends on the job alone, never on who takes it: results have the same bits for any number of threads.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import entry, jit
from kernels.cpu.layout import (
    CHUNKS,
    DONE,
    JOB,
    LEFT,
    LINE,
    ON,
    SCRATCH,
    SCRATCH_BYTES,
    STOP,
    TASK,
    THREADS,
)
from kernels.cpu.memory import call, fetch_add, read, relax, words, write


@jit
def _end(control: Any, thread: int) -> Any:
    """The chunk behind a thread's stretch."""
    return (thread + 1) * control[CHUNKS] // control[THREADS]


@jit
def scratch_of(control: Any, thread: int) -> Any:
    """The address of a thread's scratch memory; that of thread THREADS belongs to who brings the job."""
    return control[SCRATCH] + thread * SCRATCH_BYTES


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
            call(control[TASK], control, JOB, _end(control, owner) - left, scratch_of(control, me))
            done += 1
    fetch_add(control, DONE, done)
    return done


@jit
def run(control: Any, task: int, chunks: int) -> None:
    """Do a job whose words are in `control[JOB:]`, with whoever helps; it is done on return."""
    if chunks == 1:
        call(task, control, JOB, 0, scratch_of(control, 0))
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
        call(task, control, JOB, chunk, scratch_of(control, 0))


@entry
def help_out(address: int, me: int, patience: int) -> None:
    """Take chunks of the pool's jobs until there were none for `patience` looks while it is off, or it is closed."""
    control, looks = words(address), 0
    while looks < patience and read(control, STOP) == 0:
        if read(control, LEFT + LINE * me) > 0 and work(control, me) > 0:
            looks = 0
        else:
            relax()
            looks += 1 - read(control, ON)
