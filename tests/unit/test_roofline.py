"""The machine's limits: memory bandwidth and peak arithmetic, with compiled kernels and in NumPy."""

from __future__ import annotations

import platform
import re
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mlx_engine
from mlx_engine.bench import roofline
from mlx_engine.bench.roofline import bandwidth_of, read_bandwidth
from mlx_engine.bench.work import bytes_per_weight, sizes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.weights.conversion import Conversion

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
MICRO_F32 = MICRO.with_name("model-f32.gguf")


# ---- the kernels ----


@pytest.mark.parametrize("n", [0, 1, 3, 8, 15, 64, 1001])
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("way", ["read", "read_in_order"])
def test_every_word_is_read_once(n, jit, way):
    words = np.random.default_rng(n).integers(-(2**63), 2**63 - 1, n, dtype=np.int64)
    mixed = 0
    for word in words.tolist():
        mixed ^= word
    assert getattr(roofline.kernels(jit=jit), way)(words) == mixed


def test_the_arithmetic_is_done():
    source = pytest.importorskip("kernels.cpu.roofline")
    rounds, found = 9, roofline.kernels(jit=True)
    # Every chain starts at its number and goes half of the way to 2 in each round.
    want = sum(2 + (chain - 2) / 2**rounds for chain in range(source.CHAINS))
    assert found.compute(rounds) == source.compute(rounds) == pytest.approx(want, rel=1e-6)
    assert found.flops(rounds) == 2 * 9 * source.CHAINS * source.LANES


def test_the_twin_multiplies_matrices():
    assert roofline.InNumPy().compute(2) == roofline.InNumPy.SIDE
    assert roofline.InNumPy().flops(3) == 3 * 2 * roofline.InNumPy.SIDE**3


@pytest.mark.some(1)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for x86 instructions")
@pytest.mark.parametrize(
    ("name", "argument", "instruction"),
    [
        ("compute", 1, r"vfmadd\d+ps\s+.*%[yz]mm"),
        ("read", np.zeros(1, np.int64), r"vpxorq?\s+.*%[yz]mm"),
        ("read_in_order", np.zeros(1, np.int64), r"vpxorq?\s+.*%[yz]mm"),
    ],
)
def test_the_compiler_made_vectors_of_it(name, argument, instruction):
    """Without them a limit would be one of the kernel, not of the machine."""
    numba = pytest.importorskip("numba")
    roofline = pytest.importorskip("kernels.cpu.roofline")
    fresh = numba.njit(nogil=True, boundscheck=False)(getattr(roofline, name).py_func)
    fresh(argument)
    (assembly,) = fresh.inspect_asm().values()
    assert len(re.findall(instruction, assembly)) >= 4


def test_without_a_compiler_the_twins_measure(monkeypatch):
    monkeypatch.setattr(roofline, "load_kernels", lambda: None)
    assert isinstance(roofline.kernels(jit=True), roofline.InNumPy)


# ---- memory ----


@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("n", [0, 5, 8, 100])
def test_words_are_the_memory_without_the_odd_bytes_at_its_ends(shift, n):
    memory = np.arange(shift + n, dtype=np.uint8)[shift:]
    words = roofline.in_words(memory)
    assert n - 14 <= words.nbytes <= n
    assert not words.flags.writeable
    if words.size:
        assert words.ctypes.data % 8 == 0
        first = words.ctypes.data - memory.ctypes.data
        assert words.tobytes() == memory[first : first + words.nbytes].tobytes()


def test_small_arrays_are_read_in_one_go_and_large_ones_where_they_lie(monkeypatch):
    words = [np.arange(3), np.arange(5)]
    (joined,) = roofline.side_by_side(words)
    assert joined.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    monkeypatch.setattr(roofline, "SMALL", 64)
    assert roofline.side_by_side(words) is words


@pytest.mark.parametrize(("quant", "jit"), [("keep", True), ("f32", True), ("keep", False), ("q4_0", True)])
def test_the_memory_is_all_that_a_pass_multiplies_with(quant, jit):
    engine, checkpoint = mlx_engine.load(MICRO, "simd", quant, jit=jit), open_checkpoint(MICRO)
    arrays = roofline.matrices(engine, checkpoint)
    wanted = sizes(checkpoint, lambda type_: bytes_per_weight(engine.backend, type_), Conversion(quant)).nbytes
    assert sum(array.nbytes for array in arrays) == wanted


def test_where_numpy_cannot_see_the_weights_the_files_bytes_are_read():
    checkpoint = open_checkpoint(MICRO)
    arrays = roofline.matrices(mlx_engine.load(MICRO, "scalar"), checkpoint)
    assert sum(array.nbytes for array in arrays) == sum(checkpoint.weight(name).nbytes for name in checkpoint.shapes)


# ---- rates ----


class Machine:
    """Kernels that take a second per KB and per round, by a clock of their own; `read_sums` has what was read."""

    def __init__(self):
        self.now, self.words = 0.0, []

    def perf_counter(self):
        return self.now

    def read(self, words):
        self.words.append(words.tolist())
        self.now += words.nbytes / 1000
        return 0

    def read_in_order(self, words):
        self.now += words.nbytes / 500
        return 0

    def compute(self, rounds):
        self.now += rounds

    @staticmethod
    def flops(rounds):
        return 5e9 * rounds


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(roofline, "kernels", lambda *, jit: made)
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def test_a_rate_is_an_amount_over_a_time(machine):
    measured = roofline.Limits([np.zeros(1000, np.uint8)], 1)
    measured.sample(), measured.sample_in_order()
    assert measured.in_order == [pytest.approx(500)]
    assert measured.take() == {"read_gbs": pytest.approx(1e-6), "peak_gflops": pytest.approx(5.0)}
    measured.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_threads_together_read_each_word_once(machine, threads):
    measured = roofline.Limits([np.arange(100), np.arange(100, 107)], threads)
    machine.words.clear()
    measured._reading(1)
    assert len(machine.words) == threads
    assert sorted(word for words in machine.words for word in words) == list(range(107))
    measured.close()


def test_samples_are_taken_once_and_their_median_counts(machine):
    measured = roofline.Limits([np.zeros(8, np.int64)], 1)
    measured.read, measured.peak = [1e9, 9e9, 2e9], [4e9, 5e9, 60e9]
    assert measured.take() == {"read_gbs": 2.0, "peak_gflops": 5.0}
    with pytest.raises(statistics.StatisticsError):
        measured.take()
    measured.close()


@pytest.mark.parametrize(("per_call", "n"), [(1.0, 1), (roofline.SECONDS / 3, 4), (roofline.SECONDS / 1000, 1024)])
def test_a_sample_is_long_enough(per_call, n):
    assert roofline.enough(lambda repeats: repeats * per_call) == n


def test_a_real_machine_reads_more_with_a_compiler_or_without():
    for jit in (True, False):
        measured = roofline.Limits([np.ones(1 << 16, np.int64)], 2, jit=jit)
        measured.sample()
        found = measured.take()
        measured.close()
        assert 0.05 < found["read_gbs"] < 10_000
        assert 0.05 < found["peak_gflops"] < 100_000


def test_more_rounds_are_more_arithmetic():
    kernels = roofline.kernels(jit=True)
    assert all(more == 10 * less for less, more in pairwise(kernels.flops(n) for n in (1, 10, 100)))


def test_all_bytes_are_read_once_per_reading(monkeypatch: pytest.MonkeyPatch):
    now, read = [0.0], list[int]()

    def one_second(self: roofline.InNumPy, array: np.ndarray) -> int:
        now[0] += 1.0
        read.append(array.nbytes)
        return 0

    monkeypatch.setattr(roofline.InNumPy, "read", one_second)
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now[0])
    words = [np.zeros(n, dtype=np.int64) for n in (100, 7)]
    assert bandwidth_of(words, 1) == 107 * 8 / 2
    assert sum(read) == roofline.READINGS * 107 * 8
    read.clear()
    bandwidth_of(words, 2)
    assert sum(read) == roofline.READINGS * 107 * 8
    read.clear()
    monkeypatch.setattr(roofline, "MOST_BYTES", 820)
    bandwidth_of(words, 1)
    assert sum(read) == roofline.READINGS * 800


def test_weights_in_the_cache_or_on_another_device_say_nothing(monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(MICRO_F32, "parallel", threads=1)
    assert read_bandwidth(engine) is None
    monkeypatch.setattr(roofline, "cache_bytes", lambda: None)
    assert read_bandwidth(engine) is None
    monkeypatch.setattr(roofline, "cache_bytes", lambda: 1024)
    assert 0 < (read_bandwidth(engine) or 0) < 1e13
    assert read_bandwidth(mlx_engine.load(MICRO_F32, "mlx")) is None
