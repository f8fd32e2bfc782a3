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
from mlx_engine.engine import Engine
from tests.golden.convert import convert

DATA = Path(__file__).parents[1] / "data"
# Each is a file as it is there, or a folder and what it is converted to.
CHECKPOINTS = [
    *(str(path.relative_to(DATA)) for path in sorted(DATA.glob("*/model-*.gguf"))),
    *(f"{name}-micro/hf -> {type_}" for name in ("gemma3", "gpt2", "llama", "qwen2") for type_ in ("F32", "Q8_0")),
]
# Gemma's window is 8, and slides after 263 tokens.
LENGTH = 290
IDS = np.random.default_rng(0).integers(0, 60, 600).tolist()
PIECES = [layout.STACK_TOKENS + 1, 1, 1, layout.FEW, 1, 3, layout.FEW + 1, 1, 2]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    source, _, type_ = request.param.partition(" -> ")
    path = DATA / source
    if type_:
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        convert(DATA / source, path, type_)
    return mlx_engine.load(path, "parallel", threads=2)


def passes(
    engine: Engine, sizes: list[int], *, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, list[Any], int]:
    """Logits of every token, the stores, and how many passes were done at once."""
    model, layers, done = engine.model, engine.backend.layers, 0

    def watched(*args: Any) -> Any:
        nonlocal done
        y = layers(*args) if at_once else None
        done += y is not None
        return y

    rows, first = [], 0
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "layers", watched)
        # The cache grows on the way: stores move.
        patch.setattr(type(engine.backend), "kv_step", 16)
        cache = model.new_cache(sum(sizes))
        with engine.backend.session():
            for n in sizes:
                rows.append(model.forward(IDS[first : first + n], cache, every=True))
                first += n
        stores = [store[:, :, seen.start : seen.stop] for seen in cache.rooms(0) for store in (seen.store,)]
    return np.concatenate(rows), stores, done


def pieces(context: int) -> list[int]:
    """Many until the context ends, or a window has slid, which takes all its slots."""
    rest = min(context, LENGTH) - sum(PIECES) - 3
    return [*PIECES, *[layout.FEW] * (rest // layout.FEW), 1, 2]


def test_bits_are_those_of_the_words(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    sizes = pieces(engine.config.context_length)
    want, want_stores, none = passes(engine, sizes, at_once=False, monkeypatch=monkeypatch)
    found, stores, done = passes(engine, sizes, at_once=True, monkeypatch=monkeypatch)
    few = sum(n <= layout.STACK_TOKENS for n in sizes)
    assert (none, done) == (0, few if engine.config.head_dim % layout.LANES == 0 else 0)
    np.testing.assert_array_equal(found, want)
    for a, b in zip(stores, want_stores, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tables_of_rotations_grow_with_the_positions(monkeypatch: pytest.MonkeyPatch):
    """Their first length is 512."""
    engine, sizes = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd"), [2, 508, 1, 3, 1]
    want, _, _ = passes(engine, sizes, at_once=False, monkeypatch=monkeypatch)
    # Nothing shall be there that the words have made.
    engine = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd")
    found, _, done = passes(engine, sizes, at_once=True, monkeypatch=monkeypatch)
    assert done == 4
    np.testing.assert_array_equal(found, want)


def test_a_layer_that_is_replaced_is_not_used_any_more():
    engine = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd")
    model, be, cfg = engine.model, engine.backend, engine.config
    x = be.embed(model.token_embd, [7])

    def once(layers: list[Any]) -> np.ndarray:
        cache = model.new_cache(4)
        cache.reserve(1)
        with be.session():
            return np.array(be.layers(x, layers, cfg.head_dim, model.scale, 0, cache.rooms(1)))

    layers = list(model.layers)
    before = once(layers)
    norm = dataclasses.replace(layers[0].attn_norm, gain=3 * layers[0].attn_norm.gain)
    layers[0] = dataclasses.replace(layers[0], attn_norm=norm)
    changed = once(layers)
    assert np.abs(changed - before).max() > 1e-3
    np.testing.assert_array_equal(changed, once(list(layers)))


def test_what_the_kernels_lack_is_left_to_the_words():
    engine = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd")
    model, be, cfg = engine.model, engine.backend, engine.config
    last = model.layers[-1]
    bias = dataclasses.replace(last.ffn_up, bias=np.zeros(cfg.intermediate_size, np.float32))
    wide = dataclasses.replace(last.ffn_norm, gain=np.ones(layout.SCRATCH_BYTES, np.float32))
    for change in ({"ffn_up": bias}, {"ffn_norm": wide}, {"rope": None}):
        layers = [*model.layers[:-1], dataclasses.replace(last, **change)]
        cache = model.new_cache(4)
        cache.reserve(1)
        x = be.embed(model.token_embd, [7])
        with be.session():
            assert be.layers(x, layers, cfg.head_dim, model.scale, 0, cache.rooms(1)) is None
            assert be.layers(x, model.layers, cfg.head_dim, model.scale, 0, None) is None
            assert be.layers(x, model.layers, cfg.head_dim, model.scale, 0, cache.rooms(1)).shape == x.shape
