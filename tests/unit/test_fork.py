"""A process that is forked while another thread generates: the child answers, or raises one error; it never hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlx_engine.backends import create_backend
from mlx_engine.errors import BackendUnavailableError
from tests.patience import PATIENCE
from tests.scheduling import MICRO

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# A child has a minute. It exits with 0 if it gives the parent's tokens
# on threads of its own, and with 7 if the engine raises an error.
SCRIPT = """
import os, signal, sys, threading, time
import mlx_engine
from mlx_engine.machine import forks
from mlx_engine.errors import BackendUnavailableError

path, backend, jit, *modes = sys.argv[1:]
threads = 2 if backend == "parallel" else None

def loaded():
    return mlx_engine.load(path, backend, threads=threads, jit=jit == "jit")

def tokens(of):
    return of.generate("a b", 6, ignore_eos=True).token_ids

def has_workers():
    workers = engine.backend.pool._workers if (backend, jit) == ("parallel", "jit") else ()
    return all(worker.is_alive() for worker in workers)

engine = loaded()
want = tokens(engine)

def generate():
    while not ended.is_set():
        engine.generate(list(range(1, 40)), 20, ignore_eos=True)
        begun.set()

def hold():
    with engine.backend.session():
        begun.set()
        ended.wait()

def child(mode, body):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(60)
    try:
        code = 0 if body() == want and has_workers() else 3
    except BackendUnavailableError as error:
        print(error, flush=True)
        code = 7
    if mode == "exit":
        engine.close()
        sys.exit(code)
    os._exit(code)

for mode in modes:
    mode, _, tries = mode.partition(" ")
    forks.PATIENCE = 0.1 if mode == "held" else forks.PATIENCE
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold if mode == "held" else generate)
    if mode not in ("exit", "load"):
        thread.start()
        assert begun.wait(60)
    codes = []
    for i in range(int(tries or 1)):
        time.sleep(0.002 * (i % 7))
        codes.append(child(mode, lambda: tokens(loaded() if mode == "load" else engine)))
        if codes[-1] not in (0, 7):
            break
    ended.set()
    if thread.is_alive():
        thread.join()
    assert tokens(engine) == want
    print(mode, sorted(set(codes)), flush=True)  # before the next fork copies the buffer
"""


def forked(backend: str, *modes: str, jit: bool = True) -> list[str]:
    """Return the lines that children and parent print: what each mode ends with, such as "exit [0]"."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(MICRO), backend, "jit" if jit else "numpy", *modes]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout.splitlines()


@pytest.mark.slow
def test_the_child_gives_the_same_tokens_and_can_close_and_exit():
    """A fork does not wait for ever, either: of a thread that holds the session, the child is told by an error."""
    generating, leaving, error, held = forked("parallel", "generate 15", "exit", "held")
    assert (generating, leaving, held) == ("generate [0]", "exit [0]", "held [7]")
    assert "forked while another thread was in a long forward pass; fork between passes" in error


@pytest.mark.slow
def test_the_child_gives_the_same_tokens_without_compiled_code():
    assert forked("parallel", "generate 8", jit=False) == ["generate [0]"]


@pytest.mark.slow
def test_the_child_has_one_error_on_mlx_and_can_exit_and_load():
    """The children of the first modes are of a process in which no other thread has generated."""
    *errors, codes = forked("mlx", "load", "exit", "generate 5")
    assert [line for line in errors if not line.startswith("backend")] == ["load [0]", "exit [7]"]
    assert codes == "generate [7]"
    assert {line for line in errors if line.startswith("backend")} == {
        "backend 'mlx' is not available: this process was forked from the process that made the engine, and has "
        "none of MLX's threads; load the model in this process, or start the process by 'spawn' in place of 'fork'"
    }


def test_a_child_allocates_nothing_on_mlx(monkeypatch: pytest.MonkeyPatch):
    """MLX may wait for a lock that a thread of the parent held, so nothing of it is called before the error."""
    backend, child = create_backend("mlx"), os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(BackendUnavailableError, match="was forked"):
        backend.kv_empty(1, 8, 16)
    with pytest.raises(BackendUnavailableError, match="was forked"):
        backend.state_empty((1, 8), 2)


CONSTRAINED = """
import os, signal
import mlx_engine
from mlx_engine import Constraint

engine = mlx_engine.load("builtin", "simd")
options = {"constraint": Constraint.regex("[0-9]{30}"), "logprobs": 0}
want = engine.generate("Once", 9, **options).digest
stream = engine.stream("Once", 9, **options)
next(stream)  # a thread has begun with the next mask
pid = os.fork()
if not pid:
    signal.alarm(60)
for _ in stream:
    pass
ended = stream.generation.digest == want
if not pid:
    os._exit(0 if ended else 3)
print(ended, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_a_constrained_stream_goes_on_in_both_processes():
    """The thread that computes masks is in the parent alone."""
    command = [sys.executable, "-W", "ignore", "-c", CONSTRAINED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (found.stdout, found.stderr) == ("True 0\n", "")


CACHED = """
import os, signal, threading
from mlx_engine.kernels.cached import cached_property

class Slow:
    @cached_property
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            ended.wait(60)
            return "second"
        return "first"

slow, begun, ended = Slow(), threading.Event(), threading.Event()
seen = []
thread = threading.Thread(target=lambda: seen.append(slow.value))
thread.start()
begun.wait(60)
pid = os.fork()  # while the thread computes the value
if not pid:
    signal.alarm(10)
    os._exit(0 if slow.value == "first" else 3)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
kept = slow.value
ended.set()
thread.join()
print(code, kept, seen, slow.value)
"""


def test_a_fork_while_a_thread_computes_a_cached_property():
    """The child computes the property itself, and in the parent both threads return the value that was stored first."""
    command = [sys.executable, "-W", "ignore", "-c", CACHED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (found.stdout, found.stderr) == ("0 first ['first'] first\n", "")
