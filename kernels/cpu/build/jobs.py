"""Jobs: chunks of work that threads process and steal from each other. `pool.py` has the threads.

A job is a task (the address of machine code), a number of chunks, and words (int64) with the addresses and sizes that
the task needs. Each thread, including the one that submits the job, processes its own range of chunks in order, because
memory is fastest when it is read in order. Then the thread steals chunks from the ranges of other threads. The
content of a chunk does not depend on the thread that processes it, so results are bit-identical for any number of
threads.

`control` is the control block of the pool, which all of its threads share. `layout.py` describes its words.
"""

from __future__ import annotations

from typing import Any

from .jit import entry, jit
from .layout import (
    CHUNKS,
    DONE,
    JOB,
    LEFT,
    LINE,
    ON,
    SCRATCH,
    SCRATCH_BYTES,
    SLEEP,
    SLEEP_MICROSECONDS,
    SPINS,
    STOP,
    TASK,
    THREADS,
)
from .memory import call, fetch_add, invoke, read, relax, words, write


@jit
def _end(control: Any, thread: int) -> Any:
    """Return the end (exclusive) of a thread's range of chunks."""
    return (thread + 1) * control[CHUNKS] // control[THREADS]


@jit
def scratch_of(control: Any, thread: int) -> Any:
    """Return the address of a thread's scratch memory. Thread 0 is the thread that submits jobs.

    `scratch_of(control, control[THREADS])` is the second scratch memory of thread 0, which chunks do not overwrite.
    """
    return control[SCRATCH] + thread * SCRATCH_BYTES


@jit
def work(control: Any, me: int) -> Any:
    """Process chunks of thread `me`'s range, then of other ranges; return how many chunks `me` has processed.

    A thread that begins after the end of a job finds no chunks, or processes chunks of the next job. This is safe,
    because a job is replaced only after all its chunks are done.
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
def _wait(control: Any, polls: int) -> Any:
    """Wait after poll number `polls`; return the number of the next poll.

    From poll number SPINS on, the thread sleeps between polls, so that its core can run another process, or a thread of
    this pool that has a chunk but no core.
    """
    if polls < control[SPINS]:
        relax()
    else:
        invoke(control[SLEEP], (SLEEP_MICROSECONDS,))
    return polls + 1


@jit
def run(control: Any, task: int, chunks: int) -> None:
    """Run the job whose words are in `control[JOB:]`, together with the worker threads; return when the job is done.

    A job of one chunk runs in this thread alone.
    """
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
    polls = 0
    while read(control, DONE) < chunks:
        polls = _wait(control, polls)


@jit
def run_alone(control: Any, task: int, chunks: int) -> None:
    """Process all chunks of the job in this thread, which is faster than `run` for small jobs."""
    for chunk in range(chunks):
        call(task, control, JOB, chunk, scratch_of(control, 0))


@entry
def work_until_idle(address: int, me: int, patience: int) -> None:
    """Process chunks of the pool's jobs. Return if STOP is 1, or after `patience` polls without work while ON was 0."""
    control, polls, idle = words(address), 0, 0
    while idle < patience and read(control, STOP) == 0:
        if read(control, LEFT + LINE * me) > 0 and work(control, me) > 0:
            polls = idle = 0
        else:
            polls = _wait(control, polls)
            # A poll with a sleep counts as SPINS polls, because it takes about as long.
            idle += (1 - read(control, ON)) * (1 if polls < control[SPINS] else control[SPINS])
