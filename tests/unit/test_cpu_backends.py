"""The two CPU backends: which kernels run operations, and which memory layouts are accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from kernels.cpu.build import layout
from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.parameters import Linear, RMSNorm, Rope, Scores
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
RUNGS = [("simd", True), ("simd", False), ("parallel", True), ("parallel", False)]
rungs = pytest.mark.parametrize(("name", "jit"), RUNGS, ids=lambda value: str(value))


def operations(of: type) -> list[str]:
    return [name for name, member in vars(of).items() if callable(member) and not name.startswith("_")]


@rungs
def test_no_operation_comes_from_scalar(name: str, jit: bool):
    assert ScalarBackend not in type(create_backend(name, jit=jit)).__mro__


@rungs
def test_a_model_runs_where_scalar_can_do_nothing(name: str, jit: bool, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("an operation fell through to scalar")

    for operation in operations(ScalarBackend):
        monkeypatch.setattr(ScalarBackend, operation, refuse)
    engine = mlx_engine.load(MICRO, name, jit=jit)
    assert len(engine.generate([1, 2, 3, 4, 5, 6], max_tokens=3, ignore_eos=True).token_ids) == 3


@rungs
def test_names_and_threads(name: str, jit: bool):
    made = create_backend(name, threads=3, jit=jit)
    assert made.name == name
    assert getattr(made, "threads", 1) == (3 if name == "parallel" else 1)


# ---- the compiled one beside its slow twin ----


@pytest.fixture
def compiled() -> Backend:
    pytest.importorskip("numba")
    return create_backend("parallel", threads=2)


def linear(be: Backend, rng: np.random.Generator, n: int, k: int) -> Linear:
    return Linear("w", be.prepare(Weight.pack("w", rng.standard_normal((n, k)), BY_NAME["F32"])))


def view(store: np.ndarray, n_new: int) -> KVView:
    """Return all slots of a store as one sequence whose last `n_new` tokens are new."""
    n_slots = store.shape[2]
    return KVView(store, n_slots, [KVSpan(np.zeros(1, dtype=np.int64), n_slots, n_new)])


def close(found: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("t", [1, 20])
@pytest.mark.parametrize("gated_first", [True, False])
def test_a_gate_and_what_it_gates_may_also_be_two_projections(compiled: Backend, t: int, gated_first: bool):
    """Cached words of a group of layers must not be used for another operation."""
    rng = np.random.default_rng(2)
    gate, up = (linear(compiled, rng, 60, 32) for _ in range(2))
    plain = SimdBackend()
    gate_, up_ = (Linear("w", layer.weight.data.reshape(60, 32)) for layer in (gate, up))
    x, norm = rng.standard_normal((t, 32)).astype(np.float32), RMSNorm("n", np.ones(32, dtype=np.float32), 1e-6)
    for step in (gated_first, not gated_first):
        if step:
            found = [compiled.norm_gate_up(x, norm, gate, up, "silu")]
            want = [plain.norm_gate_up(x, norm, gate_, up_, "silu")]
        else:
            found, want = compiled.norm_project(x, norm, (gate, up)), plain.norm_project(x, norm, (gate_, up_))
        for a, b in zip(found, want, strict=True):
            close(a, b)


@pytest.mark.parametrize("n_projections", [8, 9, 40])
def test_any_number_of_projections(compiled: Backend, n_projections: int):
    rng = np.random.default_rng(3)
    layers = [linear(compiled, rng, 20, 32) for _ in range(n_projections)]
    x, norm = rng.standard_normal((2, 32)).astype(np.float32), RMSNorm("n", np.ones(32, dtype=np.float32), 1e-6)
    want = SimdBackend().norm_project(x, norm, [Linear("w", layer.weight.data.reshape(20, 32)) for layer in layers])
    for a, b in zip(compiled.norm_project(x, norm, layers), want, strict=True):
        close(a, b)


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """Return the same values in memory layouts: contiguous, transposed, backwards, and with gaps."""
    gaps = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, dtype=np.float32)
    gaps[..., ::2] = x
    return [x, np.asfortranarray(x), x[::-1].copy()[::-1], gaps[..., ::2]]


@pytest.mark.parametrize("t", [1, 3, 9])
def test_arrays_of_any_layout(compiled: Backend, t: int):
    rng, plain = np.random.default_rng(t), SimdBackend()
    layer, rope, norm = linear(compiled, rng, 40, 64), Rope.plain(16, 1e4), RMSNorm("n", np.ones(64, np.float32), 1e-6)
    other = Linear("w", layer.weight.data.reshape(40, 64))
    x, residual, kv = (rng.standard_normal(shape).astype(np.float32) for shape in ((t, 64), (t, 40), (2, 2, t, 16)))
    for a, b in zip(layouts(x), layouts(residual), strict=True):
        close(compiled.project_add(a, layer, b), plain.project_add(x, other, residual))
        close(compiled.norm_project(a, norm, (layer,))[0], plain.norm_project(x, norm, (other,))[0])
        for p, q in zip(
            *(be.head_norm_rope(y, y, y, 16, None, rope, range(2, 2 + t)) for be, y in ((compiled, a), (plain, x))),
            strict=True,
        ):
            close(p, q)
    for q in layouts(x.reshape(t, 4, 16)):
        close(*(be.attention(q, view(kv, t), [t], Scores(0.25)) for be in (compiled, plain)))


def test_tables_of_rotations_grow_with_the_positions(compiled: Backend):
    """The first table has 512 positions; a later position needs a longer table."""
    rng, plain, rope = np.random.default_rng(4), SimdBackend(), Rope.plain(32, 1e6)
    for offset, t in [(0, 3), (509, 3), (510, 3), (511, 1), (512, 1), (1023, 2), (40_000, 5), (2, 1)]:
        q, k, v = (rng.standard_normal((t + 1, n)).astype(np.float32) for n in (64, 32, 32))
        positions = (*range(offset, offset + t), 0)  # of another sequence
        found = compiled.head_norm_rope(q, k, v, 32, None, rope, positions)
        want = plain.head_norm_rope(q, k, v, 32, None, rope, positions)
        for a, b in zip(found, want, strict=True):
            close(a, b)


def test_two_rotations_have_a_table_each(compiled: Backend):
    x = np.random.default_rng(5).standard_normal((3, 32)).astype(np.float32)
    for theta in (1e4, 1e6, 1e4):
        rope = Rope.plain(32, theta)
        found = compiled.head_norm_rope(x, x, x, 32, None, rope, (9, 10, 11))
        close(found[0], SimdBackend().rope(x.reshape(3, 1, 32), rope, (9, 10, 11)))


@pytest.mark.parametrize("head_dim", [8, 20, 24, 40])
@pytest.mark.parametrize("t", [1, 5])
def test_heads_that_are_no_multiple_of_a_vector_have_numpys_attention(compiled: Backend, head_dim: int, t: int):
    rng, plain = np.random.default_rng(6), SimdBackend()
    q = rng.standard_normal((t, 4, head_dim)).astype(np.float32)
    kv = rng.standard_normal((2, 2, t + 3, head_dim)).astype(np.float32)
    close(*(be.attention(q, view(kv, t), [t], Scores(0.3)) for be in (compiled, plain)))


# ---- what does not fit the kernels' memory, or is not there ----


@pytest.mark.parametrize(("n_heads", "head_dim"), [(600, 256), (1, 9000 * 16)])
def test_heads_that_do_not_fit_scratch_memory_have_numpys_attention(compiled: Backend, n_heads: int, head_dim: int):
    assert layout.attention_scratch(n_heads, head_dim) > layout.SCRATCH_BYTES
    rng = np.random.default_rng(7)
    q = rng.standard_normal((3, n_heads, head_dim)).astype(np.float32)
    kv = rng.standard_normal((2, 1, 5, head_dim)).astype(np.float32)
    close(*(be.attention(q, view(kv, 3), [3], Scores(0.01)) for be in (compiled, SimdBackend())))


@pytest.mark.parametrize("t", [1, 9])
@pytest.mark.parametrize("k", [1 << 16, (1 << 16) + 16])
def test_norms_of_any_width(compiled: Backend, k: int, t: int):
    """Scratch memory cannot hold 16 normed vectors of the wider one, which runs op by op."""
    rng = np.random.default_rng(8)
    layer, norm = linear(compiled, rng, 3, k), RMSNorm("n", np.ones(k, dtype=np.float32), 1e-6)
    x, plain = rng.standard_normal((t, k)).astype(np.float32), SimdBackend()
    want = plain.norm_project(x, norm, (Linear("w", layer.weight.data.reshape(3, k)),))[0]
    close(compiled.norm_project(x, norm, (layer,))[0], want)
    close(compiled.norm_head(x, norm, layer), want)


@pytest.mark.parametrize("ids", [[-1], [5], [0, 4, 5], [-3, 1]])
def test_rows_that_a_table_does_not_have_are_refused(compiled: Backend, ids: list[int]):
    table = linear(compiled, np.random.default_rng(9), 5, 32).weight
    assert compiled.embed(table, [0, 4]).shape == (2, 32)
    with pytest.raises(IndexError, match="token ids must be from 0 to 4, not"):
        compiled.embed(table, ids)


def test_rows_may_be_named_by_any_sequence(compiled: Backend):
    table = linear(compiled, np.random.default_rng(11), 9, 32).weight
    assert compiled.embed(table, []).shape == (0, 32)
    want = compiled.embed(table, [0, 2, 4])
    for ids in ((0, 2, 4), range(0, 6, 2), np.arange(6)[::2], np.array([0, 2, 4], dtype=np.int32)):
        np.testing.assert_array_equal(compiled.embed(table, ids), want)


def test_a_layer_may_stand_behind_two_norms(compiled: Backend):
    rng = np.random.default_rng(10)
    layer, x = linear(compiled, rng, 20, 64), rng.standard_normal((1, 64)).astype(np.float32)
    other = Linear("w", layer.weight.data.reshape(20, 64))
    for scale in (1, 3, 1):
        norm = RMSNorm("n", np.full(64, scale, dtype=np.float32), 1e-6)
        close(compiled.norm_project(x, norm, (layer,))[0], SimdBackend().norm_project(x, norm, (other,))[0])
