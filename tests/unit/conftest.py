"""What several files ask about: the micro checkpoint of Qwen3. A file with another `golden` or `engine` has its own."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mlx_engine
from mlx_engine.bench import cells
from mlx_engine.bench.origin import OtherProcesses
from mlx_engine.tokenizer import sandbox_process
from mlx_engine.tokenizer.sandbox_process import SandboxProcess
from tests.unit.timed_model import Backend, Clock, Spy

DATA = Path(__file__).parents[1] / "data" / "qwen3-micro"


@pytest.fixture(scope="module", autouse=True)
def small_heap(request: pytest.FixtureRequest) -> None:
    """Leave what earlier modules have made out of the collections of benchmarks.

    A benchmark collects garbage before each of its many tests: half a second each beside the types of the HTTP clients.
    """
    if any(word in request.module.__name__ for word in ("bench", "bottlenecks", "report", "terminal")):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def alone() -> Iterator[None]:
    """Let benchmarks find no other process, though other tests run meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OtherProcesses, "share", lambda self: 0.0)
        yield


TEMPLATES = SandboxProcess()


@pytest.fixture
def one_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the chat templates of all models in one process: each process takes 60 ms of CPU to start."""
    monkeypatch.setattr(sandbox_process, "SandboxProcess", lambda: TEMPLATES)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    """Prompts, logits and greedy ids, made by another program."""
    with np.load(DATA / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    """Its float32 weights on `simd`."""
    return mlx_engine.load(str(DATA / "model-f32.gguf"), backend="simd")


@pytest.fixture
def clock(monkeypatch):
    """The clock of a timed model, which is also the benchmark's."""
    clock = Clock()
    monkeypatch.setattr(cells, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def spy(clock):
    """Make a timed model: `cost` gives the seconds of a pass of n tokens at a position."""

    def make(cost=lambda n, at: 1.0, *, lazy=False):
        return Spy(Backend(clock, lazy=lazy), cost)

    return make


@pytest.fixture
def file_of(tmp_path):
    """Write bytes to a file that is called like a model."""

    def write(data):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write
