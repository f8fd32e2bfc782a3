"""What `metal` promises beside its numbers: one launch per block, weights held once, one write for keys and values."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine
from kernels import blocks, emulator
from kernels.launch import counted, executor, planned
from kernels.metal.rows import Tuning
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.backends.metal.kernels import Kernels
from mlx_engine.backends.metal.weights import Half, SplitMatrix, affine, fallback_multiply, split
from mlx_engine.backends.observed import profiled
from mlx_engine.backends.parameters import Linear, RMSNorm, Rope
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.loop.forward import forward
from mlx_engine.loop.memory import linears
from mlx_engine.observe.profiler import Profiler
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.groups import GROUP_TYPES
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import load_model
from mlx_engine.weights.outline import stored_types
from tests.contract.check import EMULATED, load
from tests.random_blocks import random_blocks, random_groups

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return load(EMULATED, MICRO)


@pytest.fixture(scope="module")
def be(engine: mlx_engine.Engine) -> MetalBackend:
    return engine.backend


def q8_0(n: int, k: int, seed: int = 0) -> Weight:
    return Weight.pack("w", np.random.default_rng(seed).standard_normal((n, k)), BY_NAME["Q8_0"])


def matrices(engine: mlx_engine.Engine) -> list[SplitMatrix]:
    """Every matrix of the model, as often as it is named."""
    model = engine.model
    found = [model.token_embd, model.output.weight]
    for layer in model.layers:
        found += [linear.weight for linear in linears(layer)]
    return found


# ---- launches ----


def test_a_step_of_one_token_launches_each_kernel_as_often_as_a_layer_needs_it(engine):
    with engine.backend.session(), counted() as counts:
        forward(engine.model, SequenceInput([3], engine.model.new_kv(4)))
    n = engine.config.n_layers
    assert counts == {
        "embed_rows": 1, "norm_qkv": n, "head_norm_rope": n, "project_add": 2 * n, "norm_gate_up": n, "norm_project": 1,
        "attention": n,
    }  # fmt: skip
    assert engine.backend.kernels.refused == {}


@pytest.mark.slow
def test_many_tokens_take_two_launches_more_per_layer_for_the_norms(engine):
    engine.logits(list(range(20)))  # each kernel has been tried
    with engine.backend.session(), counted() as counts:
        forward(engine.model, SequenceInput(list(range(20)), engine.model.new_kv(20)))
    n = engine.config.n_layers
    assert counts == {
        "embed_rows": 1, "norm_qkv": n, "head_norm_rope": n, "project_add": 2 * n, "norm_gate_up": n, "norm_project": 1,
        "attention": n,
        "norm_rows": 2 * n - 1,  # behind the keys and values of the last layer: the last row alone
    }  # fmt: skip


def test_a_session_runs_its_kernels_where_the_backend_does(be):
    with be.session():
        assert executor() == "emulator"


def test_tuning_reaches_the_launch():
    class Fixed:
        def choose(self, kernel, args):
            return Tuning(8, 2)

    kernels = Kernels("emulator", Fixed())
    weight = split(q8_0(64, 64), kernels)
    with planned() as launches:
        assert kernels.multiply(mx.zeros((1, 64)), weight) is not None
        assert kernels.multiply(mx.zeros((9, 64)), weight) is not None
    assert {launch.kernel.name for launch in launches} == {"matvec"}
    assert all(dict(launch.template)["R"] == 8 and dict(launch.template)["NSG"] == 2 for launch in launches)


def test_a_kernel_is_tried_for_each_stored_type():
    kernels = Kernels("emulator")
    with planned() as launches:
        for name in ("Q4_0", "Q8_0", "Q4_0"):
            kernels.multiply(mx.zeros((1, 256)), split(of_type(name), kernels))
    assert len(launches) == 3 + 2  # each type once more, on zeros


# ---- weights ----


def test_weights_are_held_once_as_they_are_stored(engine):
    model = engine.model
    assert model.output.weight is model.token_embd
    assert model.token_embd.matrix is model.output.weight.matrix
    for found in matrices(engine):
        assert isinstance(found, SplitMatrix)
        assert found.nbytes == found.shape[0] * found.shape[1] * 34 // 32
        assert (found.matrix.wq.dtype, found.matrix.ws.dtype) == (mx.uint32, mx.float16)
        # Otherwise every launch would copy them.
        assert all(np.asarray(part).flags.c_contiguous for part in (found.matrix.wq, found.matrix.ws))


@pytest.mark.slow
def test_loading_and_running_keep_no_other_copy(engine):
    """Memory grows by the matrices, the norms and a table of rotations. Floats would be four times that."""
    load(EMULATED, "builtin")
    gc.collect()
    before = mx.get_active_memory()
    model = load_model(open_checkpoint(resolve("builtin")), MetalBackend("emulator"))
    with model.backend.session():
        model.backend.wait(forward(model, SequenceInput([1], model.scratch_kv(1))))
        gc.collect()
    grown = mx.get_active_memory() - before
    held = {id(m): m.nbytes for m in matrices(type("E", (), {"model": model}))}
    table = 512 * model.config.head_dim * 4
    assert sum(held.values()) <= grown <= 1.02 * sum(held.values()) + table + 100_000


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_expanded_as_anywhere_else(be, scale: float):
    weight = q8_0(3, 64)
    blocks = np.array(weight.data).view([("d", "<f2"), ("qs", "i1", (32,))])
    blocks["d"][1] = scale
    damaged = Weight("w", (3, 64), weight.type, blocks.view(np.uint8))
    found = be.prepare(damaged)
    assert isinstance(found, mx.array)
    np.testing.assert_array_equal(be.host(found), damaged.dequantize())


def of_type(name: str, n: int = 33, k: int = 256) -> Weight:
    rng = np.random.default_rng(2)
    if name == "Q8_0":
        return q8_0(n, k)
    return (random_groups if name.startswith("AFFINE") else random_blocks)(rng, "w", name, n, k)


STORED = ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "AFFINE4_G64_BF16", "AFFINE8_G32_F16"]


@pytest.mark.parametrize("name", STORED)
def test_the_fallback_agrees_with_the_definition(name: str):
    """MLX's operations from the same arrays: a product, rows, and the format of stacked experts."""
    weight = of_type(name)
    found = split(weight, Kernels("emulator"))
    w = weight.dequantize()
    for n_vectors in (1, 20):
        x = np.random.default_rng(1).standard_normal((n_vectors, w.shape[1])).astype(np.float32)
        # `mx.quantized_matmul` adds quants without their offset, which are up to twice as large, and the bias apart.
        bound = 16 * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(w).astype(np.float64).T + np.abs(x).sum(1)[:, None])
        y = np.asarray(fallback_multiply(mx.array(x), found.matrix))
        assert (np.abs(y - x @ w.astype(np.float64).T) <= bound).all()
    np.testing.assert_array_equal(np.asarray(found.matrix.dequantized(mx.array([5, 0, 32]))), w[[5, 0, 32]])
    of = affine(found)
    np.testing.assert_array_equal(np.asarray(of if isinstance(of, mx.array) else of.rows(mx.arange(33))), w)


@pytest.mark.parametrize("name", STORED)
def test_types_with_a_kernel_take_the_bytes_of_the_file(be, name: str):
    weight = of_type(name)
    found = be.prepare(weight)
    assert isinstance(found, SplitMatrix)
    assert (found.shape, found.nbytes) == (weight.shape, weight.nbytes)


def test_types_without_a_kernel_are_expanded(be):
    assert set(stored_types(be)) == {"F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K"}
    for type_ in GROUP_TYPES:
        found = be.prepare(Weight("w", (2, 128), type_, np.zeros(type_.bytes_for(256), np.uint8)))
        assert isinstance(found, SplitMatrix) == (type_.has_biases and type_.bits in (4, 8))
    vector = Weight.pack("w", np.ones(64), BY_NAME["Q8_0"])
    assert be.prepare(vector).shape == (64,)


@pytest.mark.parametrize(("name", "field"), [("Q4_0", "d"), ("Q4_K", "dmin"), ("Q6_K", "d"), ("AFFINE4_G32_F32", "m")])
def test_other_scales_that_are_no_numbers_are_expanded_too(be, name: str, field: str):
    weight = of_type(name)
    kind = weight.type.layout if name.startswith("AFFINE") else getattr(blocks, name)
    damaged = np.array(weight.data).view(kind)
    damaged[field][-1] = np.inf
    found = be.prepare(Weight("w", weight.shape, weight.type, damaged.view(np.uint8)))
    assert isinstance(found, mx.array)


# ---- keys and values ----


def heads(be: MetalBackend, t: int, offset: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    q, k, v = (be.array(rng.standard_normal((t, n))) for n in (64, 32, 32))
    return be.head_norm_rope(q, k, v, 16, None, Rope.plain(16, 1e4), range(offset, offset + t))


def test_keys_and_values_are_halves_of_one_array_and_written_where_they_belong(be):
    with be.session():
        _, k, v = heads(be, 3, 2)
        assert isinstance(k, Half)
        assert k.both is v.both
        assert (len(k), k.shape, k.nbytes) == (3, (3, 2, 16), 3 * 2 * 16 * 4)
        for slots in ([4, 5, 6], [6, 0, 3]):
            store = be.kv_write(be.kv_empty(2, 16, 8), np.array(slots), k, v)
            want = np.zeros((2, 2, 8, 16), dtype=np.float32)
            want[0][:, slots] = be.host(k).transpose(1, 0, 2)
            want[1][:, slots] = be.host(v).transpose(1, 0, 2)
            np.testing.assert_array_equal(be.host(store), want)
            assert np.abs(want[0]).max() != np.abs(want[1]).max()


@pytest.mark.parametrize("which", ["exchanged", "of two passes", "one alone"])
def test_halves_that_do_not_belong_together_are_written_one_by_one(be, which: str):
    with be.session():
        (_, k, v), (_, other, _) = heads(be, 2, 0), heads(be, 2, 0, seed=1)
        pair = {"exchanged": (v, k), "of two passes": (other, v), "one alone": (k.array(), v)}[which]
        store = be.host(be.kv_write(be.kv_empty(2, 16, 4), np.array([1, 2]), *pair))
        for part, x in zip(store, pair, strict=True):
            np.testing.assert_array_equal(part[:, 1:3], be.host(x).transpose(1, 0, 2))


@pytest.mark.parametrize("slots", [[7, 8], [70_000, 5]], ids=str)
def test_a_write_does_not_copy_the_store(be, slots: list[int]):
    with be.session():
        _, k, v = heads(be, 2, 0)
        store = be.kv_empty(2, 16, 100_000)
        be.wait(store)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        be.wait(be.kv_write(store, np.array(slots), k, v))
        assert mx.get_peak_memory() - before < store.nbytes // 4


def address(x: mx.array) -> int:
    return np.asarray(x).__array_interface__["data"][0]


def test_one_token_passes_attention_without_a_copy(be):
    """Queries leave as a view and come back as what the kernel wrote; what attention gives is a row as it lies."""
    with be.session():
        made = mx.array(np.random.default_rng(0).standard_normal((4, 1, 16)).astype(np.float32))
        mx.eval(made)
        q = made.transpose(1, 0, 2)
        assert address(q.transpose(1, 0, 2)[None]) == address(made)
        assert address(be.merge(q)) == address(made)
        np.testing.assert_array_equal(be.host(be.merge(q)), np.asarray(made).reshape(1, 64))


# ---- twins of the backend ----


def test_a_profiled_twin_counts_the_same_operations(engine):
    profiler = Profiler()
    model = load_model(open_checkpoint(MICRO), profiled(MetalBackend("emulator"), profiler))
    with model.backend.session():
        got = model.backend.host(forward(model, SequenceInput([1, 2, 3], model.new_kv(4))))
    with engine.backend.session():
        want = engine.backend.host(forward(engine.model, SequenceInput([1, 2, 3], engine.model.new_kv(4))))
    np.testing.assert_array_equal(got, want)
    assert profiler.ops["kv_write"].calls == engine.config.n_layers
    assert profiler.ops["norm_gate_up"].nbytes > 0


def test_what_has_no_kernel_is_composed(be):
    """Biases, other norms and a single matrix among float ones; each still uses the kernels that it can."""
    rng = np.random.default_rng(3)
    weight = be.array(np.ones(64))
    quantized = Linear("w", be.prepare(q8_0(32, 64)))
    biased = Linear("w", quantized.weight, be.array(rng.standard_normal(32)))
    plain = Linear("w", be.array(rng.standard_normal((32, 64))))
    x, norm = be.array(rng.standard_normal((1, 64))), RMSNorm("n", weight, 1e-6)
    with be.session():
        for linears, expected in (
            ((quantized,), {"norm_project": 1}),
            ((quantized, biased), {"norm_rows": 1, "matvec": 2}),
            ((plain, quantized), {"norm_rows": 1, "dense": 1, "matvec": 1}),
        ):
            be.norm_project(x, norm, linears)
            with counted() as counts:
                ys = be.norm_project(x, norm, linears)
            assert counts == expected
            for y, linear in zip(ys, linears, strict=True):
                want = be.linear(be.norm(x, norm), linear)
                np.testing.assert_allclose(be.host(y), be.host(want), rtol=1e-5, atol=1e-5)
