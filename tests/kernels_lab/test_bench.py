"""`bench`, without a GPU: what is counted, what is refused, and all of the timing but the times."""

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels.lab import bench as benching
from kernels.lab import bench as timing
from kernels.lab.bench import Counts, Timing, are_cold, cold_inputs, seconds_per_call, stock_product
from kernels.lab.ladder import STOCK, climb, products
from kernels.launch import ExecutorUnavailableError
from kernels.metal.rows import TUNINGS, Tuning
from tests.kernels_lab.toys import PRODUCT, SCALE, SMALL, changed, rewritten


def test_the_emulator_counts():
    counts = kernels.bench(PRODUCT, {"N": 33, "K": 64}, executor="emulator")
    assert isinstance(counts, Counts)
    assert (counts.threads, counts.threadgroups, counts.barriers) == (64, 2, 0)
    assert counts.nbytes == 33 * 64 + 33 * 4 + 64 * 4 + 33 * 4
    assert counts.weight_bytes == 34 / 32
    assert "64 threads in 2 threadgroups" in str(counts)
    assert "times need a GPU" in str(counts)
    assert counts.wrong is None


def test_simd_operations_and_barriers_are_counted_once_per_group():
    both = rewritten(
        SCALE, "const uint i", "threadgroup_barrier(mem_flags::mem_threadgroup); simd_sum(1.0f); const uint i"
    )
    counts = kernels.bench(changed(both, threadgroup=64), {"N": 128}, executor="emulator")
    assert (counts.threadgroups, counts.simd_operations, counts.barriers) == (2, 4, 2)


def test_a_wrong_kernel_is_not_measured_in_silence():
    counts = kernels.bench(rewritten(SCALE, "* a[0]", ""), {"N": 9}, executor="emulator")
    assert "the result is WRONG: y[0]: expected" in str(counts)


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_emulator_must_be_asked_for():
    with pytest.raises(ExecutorUnavailableError, match="the emulator's times do not predict"):
        kernels.bench(SCALE, {"N": 9})


def test_mlx_multiplies_the_same_numbers():
    launch, numbers = PRODUCT.launch({"N": 8, "K": 64})
    product = stock_product(PRODUCT, launch)(launch.inputs)()
    assert np.allclose(np.array(product), numbers["x"] @ numbers["w"].T, rtol=1e-5, atol=1e-5)
    assert stock_product(SCALE, SCALE.launch({"N": 8})[0]) is None


def test_copies_of_the_inputs_fill_more_than_a_cache(monkeypatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 10_000)
    inputs = [mx.arange(500), mx.ones(8, mx.bfloat16)]
    sets = cold_inputs(inputs)
    assert len(sets) == 5
    assert are_cold(sets)
    assert all(mx.array_equal(a, b) for one in sets for a, b in zip(one, inputs, strict=True))
    assert len({np.asarray(one[0]).ctypes.data for one in sets}) == 5
    few = cold_inputs([mx.arange(2)])
    assert len(few) == timing.MOST_LAUNCHES
    assert not are_cold(few)


def test_seconds_per_call_is_a_median_of_rounds():
    calls = []
    seconds = seconds_per_call([lambda: calls.append(1) or mx.ones(3) + 1] * 4)
    assert seconds > 0
    assert (len(calls) - 4) % 8 == 0  # a round that is not timed, and whole rounds of at least eight launches


@pytest.mark.slow
def test_a_timing_sets_the_rate_beside_the_limits(monkeypatch):
    """All of `bench` as on a Mac, with MLX's CPU in the place of the GPU."""

    def promise(launch, executor, **options):
        assert executor == "metal"
        x, wq, ws = launch.inputs
        if launch.kernel.name == "plain_read":
            return [x]
        return [mx.quantized_matmul(x, wq, ws.astype(mx.float32), -128 * ws.astype(mx.float32), group_size=32, bits=8)]

    monkeypatch.setattr(timing, "COLD_BYTES", 10_000)
    monkeypatch.setattr(timing, "promise", promise)
    monkeypatch.setattr(benching, "require", lambda name: None)
    monkeypatch.setattr(benching, "run", promise)
    monkeypatch.setattr(timing, "chip", lambda: "Apple M4 Pro")
    monkeypatch.setattr(timing, "read_gbs", lambda executor: 200.0)
    found = kernels.bench(PRODUCT, {"N": 32, "K": 64}, executor="metal")
    assert isinstance(found, Timing)
    assert found.is_cold
    assert found.wrong is None
    assert found.stock_seconds > 0
    assert found.nominal_gbs == 273
    assert found.gbs == pytest.approx(found.nbytes / found.seconds / 1e9)
    for words in (
        "product (metal, Apple M4 Pro) N=32 K=64",
        "of a plain read (200.0 GB/s)",
        "mx.quantized_matmul takes",
    ):
        assert words in str(found)


def test_the_plain_read_reads_all():
    assert kernels.check(timing.READ, [{"N": 64 * 256}, {"N": 64 * 512}], executor="emulator", seeds=[0])


@pytest.mark.slow
def test_the_ladder_is_climbed_for_every_product():
    rows = list(climb(SMALL, "emulator", vectors=2))
    fused = {"q+k+v": "norm_qkv", "gate+up": "norm_gate_up", "head": "norm_project", "o": "project_add"}
    for product in SMALL:
        names = [row["kernel"] for row in rows if row["product"] == product.title]
        assert names == ["thread_per_output", "simd_per_row", "matvec", fused.get(product.title, "project_add")]
    assert all(row["counts"]["threads"] > 0 and row["vectors"] == 2 for row in rows)
    (first,) = {(row["R"], row["NSG"], row["KS"]) for row in rows if row["kernel"] == "matvec"}
    assert first == (TUNINGS[0].rows, TUNINGS[0].simdgroups, 1)


def test_many_vectors_are_measured_beside_the_matrix_units():
    (first, *_) = SMALL
    names = [row["kernel"] for row in climb([first], "emulator", vectors=9, tunings=TUNINGS[:1])]
    assert names == ["thread_per_output", "simd_per_row", "tiles", "matvec", "norm_qkv"]


def test_the_ladder_keeps_the_fastest_tuning_and_mlx_beside_it(monkeypatch):
    """All of it as on a Mac, with made-up times."""
    from kernels.lab import ladder

    times = {Tuning(1, 2): 3e-6, Tuning(4, 2): 1e-6, Tuning(8, 2): 2e-6}
    monkeypatch.setattr(timing, "COLD_BYTES", 1000)
    by_rows = {tuning.rows: seconds for tuning, seconds in times.items()}
    monkeypatch.setattr(
        ladder, "seconds_per_launch", lambda launch, sets, executor: by_rows.get(dict(launch.template).get("R"), 9e-6)
    )
    rows = list(climb(SMALL[:1], "metal", tunings=list(times)))
    assert [row["kernel"] for row in rows] == ["thread_per_output", "simd_per_row", "matvec", "norm_qkv", STOCK]
    matvec = rows[2]
    assert (matvec["R"], matvec["seconds"], len(matvec["tried"])) == (4, 1e-6, 3)
    assert matvec["gbs"] == pytest.approx(matvec["nbytes"] / 1e-6 / 1e9)
    assert rows[4]["seconds"] > 0


def test_the_products_of_a_model():
    every = products(
        hidden_size=1024, intermediate_size=3072, n_heads=16, n_kv_heads=8, head_dim=128, vocab_size=151936
    )
    found = {product.title: (sum(product.rows), product.columns) for product in every}
    assert found == {
        "q+k+v": (4096, 1024),
        "o": (1024, 2048),
        "gate+up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    }
