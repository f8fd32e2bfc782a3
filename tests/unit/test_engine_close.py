"""The life of an engine: it is closed, ends its threads, stays in its process, and lets the interpreter exit."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.errors import (
    AddressInUseError,
    CacheFullError,
    ClosedError,
    ContextLengthError,
    FormatError,
    NotCopyableError,
    NotFiniteError,
    OptionError,
    SourceError,
)
from mlx_engine.loop.stream import Stream
from tests.cells import each
from tests.patience import PATIENCE, wait_for
from tests.scheduling import MICRO, options, run

TASKS = Path("/proc/self/task")

CALLS: dict[str, Callable[[mlx_engine.Engine], object]] = {
    "logits": lambda engine: engine.logits([1]),
    "generate": lambda engine: engine.generate([1], 2),
    "generate text": lambda engine: engine.generate("a", 2),
    "stream": lambda engine: engine.stream([1], 2),
    "generate_batch": lambda engine: engine.generate_batch([[1]], 2),
    "an empty batch": lambda engine: engine.generate_batch([], 2),
    "scheduler": lambda engine: engine.scheduler(),
    "prompt_ids": lambda engine: engine.prompt_ids("a"),
    "request": lambda engine: engine.request([1], options()),
    "tokenizer": lambda engine: engine.tokenizer,
    "config": lambda engine: engine.config,
    "backend": lambda engine: engine.backend,
    "with": lambda engine: engine.__enter__(),
}
BACKENDS = ["scalar", "simd", "parallel", "mlx"]


@pytest.fixture(scope="module", params=BACKENDS)
def closed(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    with mlx_engine.load(MICRO, request.param) as engine:
        assert engine.generate([1], 2, ignore_eos=True).token_ids
    return engine


@each("call", CALLS)
def test_every_call_on_a_closed_engine_raises_one_error(closed: mlx_engine.Engine, call: str):
    with pytest.raises(ClosedError, match="the engine has been closed; load the model again"):
        CALLS[call](closed)


def test_a_closed_engine_can_be_closed_and_printed(closed: mlx_engine.Engine):
    closed.close()
    assert repr(closed) == "<Engine model-q8_0.gguf: closed>"


def test_an_error_in_the_block_closes_too():
    with pytest.raises(ZeroDivisionError), mlx_engine.load(MICRO, "simd") as engine:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        engine.logits([1])


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_and_schedulers_end_with_their_engine(backend: str):
    engine = mlx_engine.load(MICRO, backend)
    stream, scheduler = engine.stream([1, 2], 50, ignore_eos=True), engine.scheduler(slots=1)
    request = engine.request([1, 2], options())
    next(stream)
    engine.close()
    scheduler.submit(request)
    run(scheduler)
    assert isinstance(request.error, ClosedError)
    with pytest.raises(ClosedError):
        list(stream)
    assert 0 < len(stream.generation.token_ids) < 50


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["simd", "parallel", "mlx"])
def test_closing_ends_the_generation_of_another_thread(backend: str):
    engine, errors, begun = mlx_engine.load(MICRO, backend), list[Exception](), threading.Event()

    def generate() -> None:
        try:
            while True:
                engine.generate([1, 2, 3], 60, ignore_eos=True)
                begun.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(PATIENCE)
    engine.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClosedError]


@pytest.mark.usefixtures("many_cores")
def test_closing_ends_the_workers_and_frees_the_weights():
    engine = mlx_engine.load(MICRO, "parallel", threads=3)
    before, model = threading.active_count(), weakref.ref(engine.model)
    stream = engine.stream([1, 2], 9)
    next(stream)
    engine.close()
    assert threading.active_count() == before - 2
    stream.close()
    assert model() is None


# ---- the threads of MLX ----


def n_threads() -> int:
    return len(list(TASKS.iterdir()))


@pytest.mark.some(1)
@pytest.mark.skipif(not TASKS.exists(), reason="Linux lists the threads of a process")
@pytest.mark.parametrize("end", ["del", "close", "close, with a stream that is kept"])
def test_engines_on_mlx_share_threads_one_after_the_other(end: str):
    kept = []
    for i in range(8):
        engine = mlx_engine.load(MICRO, "mlx")
        stream = engine.stream([1], 5, ignore_eos=True)
        next(stream)
        if end != "del":
            engine.close()
        if end.endswith("kept"):
            kept.append(stream)
        del engine, stream
        if i == 0:
            before = n_threads()
    wait_for(lambda: n_threads() <= before)  # threads of earlier tests may end meanwhile


def test_two_engines_on_mlx_have_a_stream_each():
    first, second = mlx_engine.load(MICRO, "mlx"), mlx_engine.load(MICRO, "mlx")
    assert first.backend._stream != second.backend._stream
    assert first.generate([1], 3).token_ids == second.generate([1], 3).token_ids


EXIT = """
import sys, threading, time, mlx_engine
engine, begun = mlx_engine.load(sys.argv[1], sys.argv[2]), threading.Event()
def generate():
    while True:
        for _ in engine.stream(list(range(1, 40)), 200, ignore_eos=True, temperature=0.8, logprobs=2):
            begun.set()
threading.Thread(target=generate, daemon=True).start()
assert begun.wait(60)
time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mlx", "parallel"])
def test_a_daemon_thread_that_generates_does_not_abort_the_exit(backend: str):
    found = subprocess.run(
        [sys.executable, "-c", EXIT, str(MICRO), backend], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


# ---- what it is, and where it stays ----


def test_an_engine_says_what_it_is():
    engine = mlx_engine.load(MICRO, "simd")
    assert repr(engine) == "<Engine model-q8_0.gguf: qwen3, 0.2M parameters, Q8_0, 0.2 MB of weights, simd on cpu>"
    assert MICRO.stat().st_size == pytest.approx(0.2e6, rel=0.25)
    assert "parameters, F32, 0." in repr(mlx_engine.load(MICRO, "simd", quant="f32"))


def things() -> Iterator[tuple[str, object]]:
    engine = mlx_engine.load(MICRO, "simd")
    yield "engine", engine
    yield "stream", engine.stream([1], 2)


@pytest.mark.parametrize("refused", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_engines_and_streams_are_not_copied(refused: Callable[[object], object]):
    for name, thing in things():
        with pytest.raises(NotCopyableError, match=f"^{name}s cannot be pickled or copied;"):
            refused(thing)


def test_a_result_can_be_pickled():
    result = mlx_engine.load(MICRO, "simd").generate([1], 3, logprobs=1)
    again = pickle.loads(pickle.dumps(result))
    assert (again.token_ids, again.logprobs) == (result.token_ids, result.logprobs)


def test_errors_can_be_pickled_and_have_what_they_had():
    """As pools of processes do with the error of a task: one that cannot be made again would end the pool."""
    made = [
        OptionError("top_p must be at most 1", option="top_p", expected="at most 1", found=2),
        ContextLengthError("too long", option="prompt"),
        NotFiniteError(n_tokens=2, found="NaN", origin="from a matrix", layer=3),
        CacheFullError(length=3, wanted=2, capacity=4),
        FormatError(where="a.gguf", expected="1", found="2", hint="convert it again"),
        SourceError("a.gguf: no such file"),
        AddressInUseError(host="::1", port=80),
        ClosedError(),
    ]
    for error in made:
        for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_stream_in_a_block_is_closed_at_its_end():
    engine = mlx_engine.load(MICRO, "simd")
    scheduler = engine.scheduler(slots=1)
    with Stream(scheduler, engine.request([1, 2], options())) as stream:
        next(stream)
        assert scheduler.running
    assert not scheduler.running
    assert len(stream.generation.token_ids) < 12
