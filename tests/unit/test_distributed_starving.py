"""Ranks and links that get little of what they need: the tokens are those of one process, or one line names the rank.

Slow: real processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from benchmarks.relay import free_ports
from mlx_engine.distributed.heartbeat import LIMIT as SILENCE
from tests import ranks
from tests.watched import LIMIT, MOMENTS, PROMPTS, SHARED, SIZE, SLACK, Watched, ask, generate, running_at, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits and affinity")]

N_TOKENS = 20
# Beside two processes that never wait, a rank of this niceness gets a twentieth of a core.
NICENESS = 10
# Seconds of a run in which a rank is starved.
LONGEST = 120.0


@cache
def alone(prompt: str, n: int = N_TOKENS) -> str:
    """Return what one process prints."""
    found = subprocess.run(
        [sys.executable, *generate(prompt, n)], cwd=ranks.ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout


def check_tokens(watched: Watched, prompt: str) -> None:
    """Check that all ranks end without an error, after the text of one process."""
    assert watched.wait(LONGEST) == [0] * SIZE, watched.err
    assert "".join(watched.out[0]) == alone(prompt)
    assert watched.error_lines() == []


@contextmanager
def pulses(pid: int, stopped: float, running: float) -> Iterator[None]:
    """Stop a process again and again while the context lasts."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                done.wait(stopped)
                os.kill(pid, signal.SIGCONT)
            done.wait(running)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def crowded(watched: Watched, victim: int) -> Iterator[None]:
    """Let a rank share one core with two processes that never wait, after which the system runs it."""
    core = min(os.sched_getaffinity(0))
    with ExitStack() as stack:
        for _ in range(2):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
            os.sched_setaffinity(busy.pid, {core})
        for task in Path(f"/proc/{watched.processes[victim].pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {core})
                os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)
        yield


# ---- time ----


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of ranks that nobody disturbs."""
    watched, port = serving(tmp_path_factory.mktemp("served"))
    try:
        ask(watched, port)
        return watched.answer(LONGEST)
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_that_is_stopped_again_and_again_is_waited_for(tmp_path, victim: int):
    prompt = PROMPTS["decode"]
    watched = Watched(ranks.start(tmp_path, SIZE, [*generate(prompt, N_TOKENS), *SHARED]))
    try:
        with pulses(watched.processes[victim].pid, stopped=1.0, running=0.3):
            check_tokens(watched, prompt)
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_that_is_mostly_stopped_is_waited_for(tmp_path, victim: int):
    watched = running_at("decode", tmp_path, victim, n=N_TOKENS)
    try:
        with pulses(watched.processes[victim].pid, stopped=SILENCE - 1.5, running=0.3):
            check_tokens(watched, PROMPTS["decode"])
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_stopped_for_less_than_the_limit_is_waited_for(tmp_path, answer: str, moment: str, victim: int):
    watched = running_at(moment, tmp_path, victim, n=N_TOKENS)
    try:
        os.kill(watched.processes[victim].pid, signal.SIGSTOP)
        time.sleep(SILENCE - 1.0)
        os.kill(watched.processes[victim].pid, signal.SIGCONT)
        if moment == "serve":
            assert watched.answer(LONGEST) == answer
            assert watched.error_lines() == []
        else:
            check_tokens(watched, PROMPTS.get(moment, PROMPTS["prefill"]))
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_with_a_twentieth_of_a_core_is_waited_for(tmp_path, victim: int):
    watched = running_at("decode", tmp_path, victim, n=N_TOKENS)
    try:
        with crowded(watched, victim):
            check_tokens(watched, PROMPTS["decode"])
    finally:
        watched.close()


# ---- memory ----


def limit_memory(watched: Watched, victim: int, more: int) -> None:
    """Let a rank have as many more bytes of addresses than it has."""
    pid = watched.processes[victim].pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def check_named_or_right(watched: Watched, victim: int, prompt: str) -> None:
    """Check that the rank without memory was named in time, or that it needed no more."""
    codes = watched.wait(LONGEST)
    if codes == [0] * SIZE:
        assert "".join(watched.out[0]) == alone(prompt)
        return
    lines = watched.error_lines()
    assert len(lines) == 1, watched.err
    assert f"rank {victim}" in lines[0]


@pytest.mark.parametrize("more", [1 << 20, 64 << 20])
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "serve"])
def test_a_rank_without_memory_is_named(tmp_path, moment: str, victim: int, more: int):
    watched = running_at(moment, tmp_path, victim, n=N_TOKENS)
    try:
        limit_memory(watched, victim, more)
        check_named_or_right(watched, victim, PROMPTS.get(moment, PROMPTS["prefill"]))
    finally:
        watched.close()


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_rank_of_a_server_without_memory_is_named_or_a_request_fails(tmp_path, victim: int):
    watched, port = serving(tmp_path)
    try:
        limit_memory(watched, victim, 0)
        ask(watched, port, "once upon a time there was " * 60, n=2)
        assert watched.client is not None
        reply = watched.client.communicate(timeout=LIMIT + SLACK)[0]
        if victim:
            assert all(watched.wait(LIMIT + SLACK))
            (line,) = watched.error_lines()
            assert f"rank {victim}" in line
        else:  # rank 0 can refuse a request, or close the connection
            assert "choices" not in reply
            assert all("rank 0" in line for line in watched.error_lines())
    finally:
        watched.close()


# ---- links ----


@contextmanager
def linked(
    folder: Path, command: list[str], size: int = SIZE, rate: float = 1e9
) -> Iterator[tuple[Watched, list[subprocess.Popen[str]]]]:
    """Yield ranks whose links are relays, and the relay towards each rank.

    The ring connects to the address of the next rank, so each rank has a file of addresses with the relay in its place.
    """
    with ExitStack() as stack:
        ports, made, towards = free_ports(size), [], []
        for port in ports:
            relay = ["-m", "benchmarks.relay", "--rate", str(rate), "--latency", "0.001", f"0:{port}"]
            made.append(subprocess.Popen([sys.executable, *relay], cwd=ranks.ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(made[-1].communicate)
            stack.callback(made[-1].kill)
            towards.append(int(made[-1].stdout.readline()))
        started = []
        for rank in range(size):
            seen = [towards[i] if i == (rank + 1) % size else ports[i] for i in range(size)]
            started.append(ranks.start_rank(folder, rank, seen, command))
        watched = Watched(started)
        stack.callback(watched.close)
        yield watched, made


@pytest.mark.parametrize("to", range(SIZE))
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_link_that_stalls_for_less_than_the_limit_is_waited_for(tmp_path, moment: str, to: int):
    prompt = PROMPTS[moment]
    with linked(tmp_path, [*generate(prompt, N_TOKENS), *SHARED]) as (watched, relays):
        watched.wait_for(lambda: "KV cache" in "".join(watched.err[0]))
        if moment == "decode":
            watched.wait_for(lambda: len("".join(watched.out[0])) > len(prompt) + 4)
        for _ in range(2):
            relays[to].send_signal(signal.SIGSTOP)
            time.sleep(SILENCE - 3)
            relays[to].send_signal(signal.SIGCONT)
            time.sleep(0.5)
        check_tokens(watched, prompt)


@pytest.mark.parametrize("to", [1, 2])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_link_that_stalls_for_good_is_named(tmp_path, moment: str, to: int):
    """The beats of ranks 1 and 2 do not take these links, which are those from ranks 0 and 1."""
    prompt = PROMPTS[moment]
    with linked(tmp_path, [*generate(prompt, 300), *SHARED]) as (watched, relays):
        watched.wait_for(lambda: "KV cache" in "".join(watched.err[0]))
        if moment == "decode":
            watched.wait_for(lambda: len("".join(watched.out[0])) > len(prompt) + 4)
        relays[to].send_signal(signal.SIGSTOP)
        assert watched.wait(LONGEST) == [1] * SIZE
        (line,) = watched.error_lines()
        if "gather" in line:  # on a busy machine other ranks still load
            assert all(f"rank {rank} " in line for rank in (to - 1, to))
        else:
            assert line.startswith(
                f"error: rank {to - 1} (127.0.0.1): a message that was sent does not arrive at rank {to} "
            )


def test_a_link_that_stalls_for_good_in_a_gather_is_named(tmp_path):
    """The beats do not take the relay, which carries rank 0's messages, and the blocks of rank 1 in gathers."""
    with linked(tmp_path, [*generate(PROMPTS["prefill"], 300), "--shard", "tensor"], size=2) as (watched, relays):
        watched.wait_for(lambda: "KV cache" in "".join(watched.err[0]))
        time.sleep(0.3)
        assert not watched.out[0]  # the pass is under way, and its message has arrived
        relays[1].send_signal(signal.SIGSTOP)
        assert watched.wait(LONGEST) == [1] * 2
        (line,) = watched.error_lines()
        assert line.startswith("error: rank 1 (127.0.0.1): a gather that all ranks have begun does not end on rank 0 ")
