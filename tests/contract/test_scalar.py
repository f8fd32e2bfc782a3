"""Compare `scalar`, which defines every operation, with textbook formulas in float64."""

import numpy as np
import pytest

from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.parameters import Linear, Rope, Scores
from tests.contract import formulas

be = ScalarBackend()


def agree(found: object, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), want, rtol=1e-12, atol=1e-14)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def test_linear():
    x, w, b = normal(3, 20), normal(7, 20), normal(7)
    agree(be.linear(x.tolist(), Linear("w", w.tolist(), b.tolist())), formulas.linear(x, w, b))
    agree(be.linear(x.tolist(), Linear("w", w.tolist())), formulas.linear(x, w, np.zeros(7)))


@pytest.mark.parametrize("shape", [(4, 12), (3, 2, 12)])
def test_rms_norm(shape: tuple[int, ...]):
    x, weight = normal(*shape), normal(12)
    agree(be.rms_norm(x.tolist(), weight.tolist(), 1e-3), formulas.rms_norm(x, weight, 1e-3))


def test_layer_norm():
    x, weight, bias = normal(4, 12), normal(12), normal(13)[:12]
    agree(be.layer_norm(x.tolist(), weight.tolist(), bias.tolist(), 1e-3), formulas.layer_norm(x, weight, bias, 1e-3))


@pytest.mark.parametrize("offset", [0, 1, 5000])
def test_rope(offset: int):
    x, rope = normal(3, 2, 8), Rope.plain(8, 1e4)
    agree(be.rope(x.tolist(), rope, range(offset, offset + 3)), formulas.rope(x, rope, offset))


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(3, 3, 4, 2), (1, 6, 6, 2), (2, 5, 3, 1), (4, 6, 2, 2)]
)
def test_attention(queries: int, keys: int, heads: int, kv_heads: int, window: int | None):
    q, k, v = normal(queries, heads, 8), normal(keys, kv_heads, 8), normal(keys, kv_heads, 8) + 1
    span = KVSpan(np.array([4, 0, 2]), keys, queries)  # pages of two tokens
    slots = np.arange(6)[span.slots(0, keys, 2)]
    store = be.kv_write(be.kv_empty(kv_heads, 8, 6), slots, k.tolist(), v.tolist())
    view = KVView(store, 2, [span], window)
    plain, none = be.attention(q.tolist(), view, [queries], Scores(0.3)), np.full(heads, -np.inf)
    agree(plain, formulas.attention(q, k, v, 0.3, window, 1e9, none))
    for cap, sinks in ((0.7, none), (1e9, normal(heads)), (2.0, normal(heads))):
        own = None if sinks is none else sinks.tolist()
        found = be.attention(q.tolist(), view, [queries], Scores(0.3, cap if cap < 1e9 else None, own))
        agree(found, formulas.attention(q, k, v, 0.3, window, cap, sinks))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_erf", "relu2"])
def test_activations(name: str):
    x = np.concatenate([normal(30), [0.0, 30.0, -30.0, 5.0, -5.0]])[None]
    np.testing.assert_allclose(getattr(be, name)(x.tolist()), getattr(formulas, name)(x), rtol=1e-12, atol=1e-11)


def test_clamped_swiglu():
    gate, up = 6 * normal(9, 30), 6 * normal(9, 30)
    agree(be.clamped_swiglu(gate.tolist(), up.tolist()), formulas.clamped_swiglu(gate, up))


def test_scale():
    agree(be.scale(normal(3, 4).tolist(), 0.3), 0.3 * normal(3, 4))


def test_soft_cap():
    agree(be.soft_cap(normal(3, 4).tolist(), 0.3), formulas.soft_cap(normal(3, 4), 0.3))


def test_linear_scaling_divides_the_frequencies():
    plain, scaled = Rope.plain(8, 1e6), Rope.plain(8, 1e6, 8.0)
    assert scaled.frequencies == pytest.approx([f / 8 for f in plain.frequencies], rel=1e-15)


def test_plain_frequencies_are_those_of_the_paper():
    assert Rope.plain(4, 100.0).frequencies == (1.0, pytest.approx(0.1))
