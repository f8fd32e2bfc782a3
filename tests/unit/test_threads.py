"""Threads change how fast a result comes, never one bit of it; and a process with threads ends as any other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.numpy import simd
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import SequenceInput
from mlx_engine.engine import Engine
from mlx_engine.loop.forward import forward
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "tests" / "data" / "qwen3-micro"
IDS = np.random.default_rng(0).integers(0, 512, 90).tolist()
pytestmark = pytest.mark.usefixtures("many_cores")

files = pytest.mark.parametrize("file", ["model-q8_0.gguf", "model-f32.gguf"])


def passes(engine: Engine) -> np.ndarray:
    """Logits of one pass over many tokens, of a pass over a few, and of single tokens after them."""
    model = engine.model
    kv = model.new_kv(len(IDS), page=16)
    pieces = [IDS[:70], IDS[70:73], *([token] for token in IDS[73:])]
    with engine.backend.session():
        return np.concatenate(
            [model.backend.host(forward(model, SequenceInput(ids, kv, wanted=None))) for ids in pieces]
        )


def batches(engine: Engine) -> np.ndarray:
    """Logits of three sequences whose passes have many tokens and few side by side, then one token of each."""
    model = engine.model
    pool = model.new_pool(200, n_sequences=3, page=16)
    sequences, at = [pool.sequence() for _ in range(3)], 0
    rows = []
    with engine.backend.session():
        for lengths in ((60, 3, 1), (1, 40, 5), (1, 1, 1), (1, 1, 1)):
            parts = [SequenceInput(IDS[at : at + n], kv, wanted=None) for n, kv in zip(lengths, sequences, strict=True)]
            rows.append(model.backend.host(forward(model, *parts)))
            at += 7
    return np.concatenate(rows)


@pytest.mark.some(1)
@files
def test_compiled_bits_do_not_depend_on_the_number_of_threads(file: str, monkeypatch: pytest.MonkeyPatch):
    layout = pytest.importorskip("kernels.cpu.build.layout")
    # The model is so small that one thread would do most of it; chunks of a few rows are for several.
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1024)
    alone = mlx_engine.load(MICRO / file, "simd")
    for threads in (1, 2, 3, 5):
        of = mlx_engine.load(MICRO / file, "parallel", threads=threads)
        for run in (passes, batches):
            np.testing.assert_array_equal(run(of), run(alone), err_msg=f"{threads} threads")


@pytest.mark.slow
@files
def test_bits_without_compiled_code_do_not_depend_on_the_number_of_threads(file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simd, "WORTHWHILE", 2000)
    results = []
    for threads in (1, 2, 3, 5):
        engine = mlx_engine.load(MICRO / file, "parallel", threads=threads, jit=False)
        chunks = chunks_of(engine, monkeypatch)
        results.append(passes(engine))
        # Products in up to 16 chunks of rows, attention in one for each key/value head, all rows exactly once.
        assert {len(edges) for edges in chunks} >= {engine.config.n_kv_heads, simd.CHUNKS}
        for edges in chunks:
            assert [first for first, _ in edges] == [0, *(last for _, last in edges[:-1])]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    plain = passes(mlx_engine.load(MICRO / file, "simd", jit=False))
    assert np.linalg.norm(results[0] - plain) < 1e-6 * np.linalg.norm(plain)


def chunks_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """What the backend hands out from now on: first and last rows of every job."""
    jobs, hand_out = [], engine.backend._executor.map

    def watched(work, firsts, lasts):
        jobs.append(list(zip(firsts, lasts, strict=True)))
        return hand_out(work, firsts, lasts)

    monkeypatch.setattr(engine.backend._executor, "map", watched)
    return jobs


def test_what_a_chunk_raises_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simd, "WORTHWHILE", 1)
    be = create_backend("parallel", threads=2, jit=False)
    with pytest.raises(ValueError, match="matmul"):
        be.linear(np.ones((2, 31), dtype=np.float32), Linear("w", np.ones((20, 32), dtype=np.float32)))


def test_one_thread_at_a_time_holds_the_session_of_a_compiled_backend():
    pytest.importorskip("numba")
    be, entered = create_backend("parallel", threads=2), threading.Event()

    def enter() -> None:
        with be.session():
            entered.set()

    other = threading.Thread(target=enter)
    with be.session(), be.session():  # the same thread may enter again
        other.start()
        assert not entered.wait(0.1)
    assert entered.wait(PATIENCE)
    other.join()


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_two_threads_on_one_engine_get_what_each_would_get_alone(jit: bool):
    engine = mlx_engine.load(MICRO / "model-q8_0.gguf", "parallel", threads=3, jit=jit)
    prompts = [IDS[:5], IDS[5:30], IDS[30:38], IDS[38:39]]
    generate = partial(engine.generate, max_tokens=12, temperature=0.8, seed=7, ignore_eos=True)
    wanted = [generate(prompt).token_ids for prompt in prompts]
    found: dict[tuple[int, int], list[int]] = {}

    def run(thread: int) -> None:
        for i, prompt in enumerate(prompts):
            found[thread, i] = generate(prompt).token_ids

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(thread, i): wanted[i] for thread in range(3) for i in range(len(prompts))}


# ---- the end of a process ----

PROCESS = """
import signal, sys
import mlx_engine
from mlx_engine.machine import memory as limits
limits.usable_cores = lambda: 8

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
path, how = sys.argv[1:]
engines = [mlx_engine.load(path, "parallel", threads=3, jit=jit) for jit in (True, False)]
dropped = [mlx_engine.create_backend("parallel", threads=4) for _ in range(3)]
del dropped[0]
for engine in engines:
    engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True)
print("ready", flush=True)
if how == "exit":
    sys.exit(3)
if how == "exception":
    raise RuntimeError("on purpose")
while how == "interrupt":
    for engine in engines:
        engine.generate([1, 2, 3], max_tokens=50, ignore_eos=True)
"""


@pytest.mark.slow
def test_a_process_ends_at_once_and_quietly_however_it_ends():
    ways = ("exit", "exception", "interrupt")
    command = [sys.executable, "-c", PROCESS, str(MICRO / "model-q8_0.gguf")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {how: subprocess.Popen([*command, how], cwd=ROOT, **pipes) for how in ways}
    try:
        assert running["interrupt"].stdout.readline() == "ready\n"
        running["interrupt"].send_signal(signal.SIGINT)
        said = {how: process.communicate(timeout=PATIENCE)[1] for how, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert [running[how].returncode for how in ways] == [3, 1, -signal.SIGINT]
    assert said["exit"] == ""
    for how, last in (("exception", "RuntimeError: on purpose\n"), ("interrupt", "KeyboardInterrupt\n")):
        assert said[how].startswith("Traceback (most recent call last):\n")
        assert said[how].endswith("\n" + last)
        assert "gnored" not in said[how]
        assert "Exception in thread" not in said[how]
