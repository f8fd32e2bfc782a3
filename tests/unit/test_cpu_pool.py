"""The pool of worker threads: every chunk is processed once, idle threads park, and all threads end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import carray

from kernels.cpu.build import jobs, layout, pool
from kernels.cpu.build.jit import Task, jit
from kernels.cpu.build.library import load
from kernels.cpu.build.memory import fetch_add, floats, read, relax
from mlx_engine.backends import create_backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.patience import PATIENCE as SECONDS
from tests.patience import wait_for

# Polls of a chunk that waits for others: some 20 milliseconds.
PATIENCE = 1 << 20


@Task
def count(job: Any, chunk: int, scratch: int) -> None:
    """Count the chunk, after a delay of up to 2 job[1] polls, so that chunks end in another order than they begin."""
    counts = floats(job[0])
    for _ in range(job[1] * (chunk % 3)):
        relax()
    counts[chunk] += 1


@jit
def wrong_counts(control: Any, address: int, counts: Any, chunks: int, n: int) -> int:
    """Run a job n times; return how many chunks were not processed exactly once."""
    wrong = 0
    for _ in range(n):
        counts[:] = 0
        jobs.run(control, address, chunks)
        for i in range(len(counts)):
            wrong += counts[i] != (1 if i < chunks else 0)
    return wrong


@Task
def meet(job: Any, chunk: int, scratch: int) -> None:
    """Wait until job[1] chunks run at the same time, which needs as many threads; then count the chunk."""
    words = carray(job, 64)
    fetch_add(words, 0, 1)
    looks = 0
    while read(words, 0) < words[1] and looks < words[2]:
        relax()
        looks += 1
    if looks < words[2]:
        fetch_add(words, 3, 1)


def meets(made: pool.Pool, threads: int) -> bool:
    """Return whether `threads` chunks ran at the same time; a busy machine may need several attempts."""
    for _ in range(100):
        made.shared.wake()
        made.control[layout.JOB :][:4] = 0, threads, PATIENCE, 0
        jobs.run(made.control, meet.address, threads)
        if made.control[layout.JOB + 3] == threads:
            return True
    return False


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlx_engine-worker"]


@pytest.fixture
def four() -> Iterator[pool.Pool]:
    made = pool.Pool(4, load())
    yield made
    made.close()


# ---- chunks ----


@pytest.mark.some(1)
@pytest.mark.parametrize("chunks", [2, 3, 5, 17, 64])
@pytest.mark.parametrize("waste", [0, 20])
def test_every_chunk_is_done_once_and_before_the_job_is_over(four: pool.Pool, chunks: int, waste: int):
    """Thousands of small jobs, on more threads than there are cores."""
    counts = np.zeros(64, dtype=np.float32)
    four.control[layout.JOB], four.control[layout.JOB + 1] = counts.ctypes.data, waste
    for _ in range(8):
        four.shared.wake()
        assert wrong_counts(four.control, count.address, counts, chunks, 100) == 0


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 6, 7, 50])
def test_any_number_of_chunks_on_any_number_of_threads(threads: int, chunks: int):
    made, counts = pool.Pool(threads, load()), np.zeros(64, dtype=np.float32)
    made.control[layout.JOB], made.control[layout.JOB + 1] = counts.ctypes.data, 0
    assert wrong_counts(made.control, count.address, counts, chunks, 3) == 0
    made.close()


def test_alone_the_same_chunks_are_done(four: pool.Pool):
    counts = np.zeros(64, dtype=np.float32)
    four.control[layout.JOB], four.control[layout.JOB + 1] = counts.ctypes.data, 0
    jobs.run_alone(four.control, count.address, 20)
    assert counts.tolist() == [1] * 20 + [0] * 44


def test_a_pool_needs_a_thread():
    with pytest.raises(ValueError, match="at least one thread, found 0"):
        pool.Pool(0, load())


# ---- waiting ----


@Task
def unequal(job: Any, chunk: int, scratch: int) -> None:
    """Take long for chunk 1, job[1] polls; chunk 0 ends when chunk 1 has begun."""
    words = carray(job, 64)
    if chunk == 0:
        looks = 0
        while read(words, 0) == 0 and looks < words[1]:
            relax()
            looks += 1
    else:
        fetch_add(words, 0, 1)
        for _ in range(words[1]):
            relax()


def sleeps() -> int:
    """Return how often threads of this process have given their core back. Times of the CPU depend on other loads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


@pytest.mark.slow
def test_a_thread_that_waits_for_a_long_chunk_sleeps():
    """It would take the core from the thread that has the chunk, if there are too few of them."""
    made, n = pool.Pool(2, load()), 0
    made.control[layout.ON] = 1
    made.shared.wake()
    for _ in range(20):  # on a busy machine one thread may have both chunks
        made.control[layout.JOB :][:2] = 0, PATIENCE << 1
        before = sleeps()
        jobs.run(made.control, unequal.address, 2)
        n = max(n, sleeps() - before)
        if n > 20:
            break
    made.close()
    assert n > 20


def test_threads_sleep_while_the_next_job_is_late():
    """The submitting thread may have lost its core to another process."""
    made = pool.Pool(3, load())
    made.control[layout.ON] = 1  # no thread parks
    made.shared.wake()
    before, looks = sleeps(), itertools.count()
    # `wait_for` itself sleeps once for each look. On busy cores a thread that wakes waits for milliseconds.
    wait_for(lambda: sleeps() - before > 500 + 2 * next(looks), pause=0.05)
    wait_for(lambda: len(made.shared.parked) == 0)  # each thread that woke says so itself
    made.close()


# ---- parking ----


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_work_at_the_same_time_also_after_parking(threads: int):
    made = pool.Pool(threads, load())
    for _ in range(3):
        assert meets(made, threads)
        wait_for(lambda: len(made.shared.parked) == threads - 1)
    made.close()


def test_an_idle_pool_uses_no_time(four: pool.Pool):
    assert meets(four, 2)
    wait_for(lambda: len(four.shared.parked) == 3)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_the_caller_does_the_job_alone_while_threads_are_parked(four: pool.Pool):
    """The submitting thread does not wait for worker threads."""
    wait_for(lambda: len(four.shared.parked) == 3)
    counts = np.zeros(8, dtype=np.float32)
    four.control[layout.JOB], four.control[layout.JOB + 1] = counts.ctypes.data, 0
    jobs.run(four.control, count.address, 8)
    assert counts.tolist() == [1] * 8
    assert len(four.shared.parked) == 3


@pytest.mark.some(4)
@pytest.mark.parametrize("steps", range(1, 60, 4))
def test_threads_wake_and_end_though_somebody_was_interrupted_while_waking_them(steps: int):
    made, left = pool.Pool(4, load()), steps

    def interrupt(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code is not pool._Shared.wake.__code__:
            return None
        frame.f_trace_opcodes = True
        left -= what == "opcode"
        if left == 0:
            raise KeyboardInterrupt
        return interrupt

    wait_for(lambda: len(made.shared.parked) == 3)
    before = sys.gettrace()  # of coverage
    sys.settrace(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            made.shared.wake()
    finally:
        sys.settrace(before)
    assert left == 0
    assert meets(made, 4)
    wait_for(lambda: len(made.shared.parked) == 3)
    made.close()
    assert not any(thread.is_alive() for thread in made._workers)


def test_no_thread_parks_while_jobs_follow_each_other(four: pool.Pool):
    """The caller has checked for parked threads already: a thread that parked now would miss all of these jobs."""
    four.control[layout.ON] = 1
    late = threading.Thread(target=four.shared.park, args=(0,))
    late.start()
    late.join(SECONDS)
    ended, four.control[layout.ON] = not late.is_alive(), 0
    assert ended
    late = threading.Thread(target=four.shared.park, args=(0,))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    while late.is_alive():
        four.shared.wake()


def test_a_backend_wakes_its_workers(monkeypatch: pytest.MonkeyPatch):
    be = create_backend("parallel", threads=3)
    weight = Weight.pack("w", np.ones((4000, 64)), BY_NAME["Q8_0"])
    layer, x = Linear("w", be.prepare(weight)), np.ones((1, 64), dtype=np.float32)
    wait_for(lambda: len(be.pool.shared.parked) == 2)
    woken, wake = [], be.pool.shared.wake
    monkeypatch.setattr(be.pool.shared, "wake", lambda: woken.append(wake()))
    be.linear(x, layer)
    assert len(woken) == 1


# ---- the end ----


def test_closing_ends_the_threads(four: pool.Pool):
    mine = four._workers
    assert all(thread.is_alive() for thread in mine)
    wait_for(lambda: len(four.shared.parked) == 3)
    four.close()
    assert not any(thread.is_alive() for thread in mine)
    four.close()  # again, and nothing happens


def test_closing_while_they_look_for_work_ends_the_threads():
    for _ in range(20):
        made = pool.Pool(3, load())
        made.close()
        assert not any(thread.is_alive() for thread in made._workers)


@pytest.mark.slow
def test_pools_that_are_dropped_leave_no_threads():
    gc.collect()
    before = len(workers())
    for _ in range(20):
        made = pool.Pool(3, load())
        assert len(workers()) == before + 2
        del made
        assert len(workers()) == before


def test_backends_that_are_dropped_leave_no_threads():
    gc.collect()
    before, x = threading.active_count(), np.ones((1, 32), dtype=np.float32)
    weight = Weight.pack("w", np.ones((9, 32)), BY_NAME["F32"])
    for jit_ in (True, False):
        for _ in range(3):
            made = create_backend("parallel", threads=3, jit=jit_)
            made.linear(x, Linear("w", made.prepare(weight)))
            del made
            gc.collect()
    wait_for(lambda: threading.active_count() == before)


def test_no_thread_parks_between_a_backend_s_check_for_parked_threads_and_the_end_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else a thread that waits for the interpreter's lock to park would park when the call releases the lock."""
    be = create_backend("parallel", threads=2)
    layer = Linear("w", be.prepare(Weight.pack("w", np.ones((40, 64)), BY_NAME["Q8_0"])))
    control, stayed = be.pool.control, []

    def look(shared: pool._Shared) -> None:
        stayed.append(control[layout.ON])

    def fail(*arguments: int) -> None:
        stayed.append(control[layout.ON])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pool._Shared, "wake", look)
        patched.setattr(be.library, "project", fail)
        with pytest.raises(KeyboardInterrupt):
            be.linear(np.ones((1, 64), dtype=np.float32), layer)
    assert stayed == [1, 1]
    assert control[layout.ON] == 0
    be.linear(np.ones((1, 64), dtype=np.float32), layer)
    assert control[layout.ON] == 0
