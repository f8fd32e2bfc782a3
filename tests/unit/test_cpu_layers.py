"""All layers in one call give the bits that the words of the model give, and leave the same keys and values behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from kernels.cpu import layout
from mlx_engine.backends.parameters import LayerNorm
from mlx_engine.cache import FullCache
from mlx_engine.engine import Engine

DATA = Path(__file__).parents[1] / "data"
MODELS = sorted(path.parent.name for path in DATA.glob("*/model-q8_0.gguf"))
IDS = np.random.default_rng(0).integers(0, 60, 60).tolist()
PIECES = [20, 1, 1, layout.FEW, 1, 3, layout.FEW + 1, 1, 2]


def passes(engine: Engine, *, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[Any], int]:
    """Logits of every token, the stores, and how many passes were done at once."""
    model, layers, done = engine.model, engine.backend.layers, 0

    def watched(*args: Any) -> Any:
        nonlocal done
        y = layers(*args) if at_once else None
        done += y is not None
        return y

    monkeypatch.setattr(engine.backend, "layers", watched)
    # The cache grows on the way: stores move.
    cache = FullCache(
        engine.backend, n_layers=engine.config.n_layers, n_kv_heads=engine.config.n_kv_heads,
        head_dim=engine.config.head_dim, capacity=len(IDS), step=16,
    )  # fmt: skip
    rows, first = [], 0
    with engine.backend.session():
        for n in PIECES:
            rows.append(model.forward(IDS[first : first + n], cache, every=True))
            first += n
    return np.concatenate(rows), [store[:, :, :first] for store in cache._stores], done


@pytest.mark.parametrize("file", ["model-q8_0.gguf", "model-f32.gguf"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_words(name: str, file: str, monkeypatch: pytest.MonkeyPatch):
    if not (DATA / name / file).exists():
        pytest.skip(f"{name} has no {file}")
    engine = mlx_engine.load(DATA / name / file, "parallel", threads=2)
    want, want_stores, none = passes(engine, at_once=False, monkeypatch=monkeypatch)
    monkeypatch.undo()
    found, stores, done = passes(engine, at_once=True, monkeypatch=monkeypatch)
    few = sum(n <= layout.FEW for n in PIECES)
    assert (none, done) == (0, few if engine.config.head_dim % layout.LANES == 0 else 0)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(stores, want_stores)


def test_what_the_kernels_lack_is_left_to_the_words():
    engine = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd")
    model, be, cfg = engine.model, engine.backend, engine.config
    norm = model.layers[-1].ffn_norm
    other = LayerNorm(norm.name, norm.gain, np.zeros_like(norm.gain), norm.eps)
    bias = dataclasses.replace(model.layers[0].ffn_up, bias=np.zeros(cfg.intermediate_size, np.float32))
    for change in ({"ffn_norm": other}, {"ffn_up": bias}):
        layers = [*model.layers[:-1], dataclasses.replace(model.layers[-1], **change)]
        cache = model.new_cache(4)
        cache.reserve(1)
        x = be.embed(model.token_embd, [7])
        with be.session():
            assert be.layers(x, layers, cfg.head_dim, model.rope, model.scale, 0, cache.rooms(1)) is None
            assert be.layers(x, model.layers, cfg.head_dim, model.rope, model.scale, 0, None) is None
            assert be.layers(x, model.layers, cfg.head_dim, model.rope, model.scale, 0, cache.rooms(1)).shape == x.shape
