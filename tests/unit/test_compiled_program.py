"""Compiled programs give the bits of the definition run operation by operation, and follow whoever edits it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from kernels.cpu import layout
from mlx_engine.backends.base import Backend
from mlx_engine.backends.compiled import CompiledBackend
from mlx_engine.backends.compiled_program import CompiledProgram
from mlx_engine.backends.parameters import Linear, RMSNorm
from mlx_engine.backends.program import OpByOp
from mlx_engine.cache import FullCache
from mlx_engine.engine import Engine
from mlx_engine.models import decoder
from mlx_engine.models.decoder import decoder_layer
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.contract.check import BACKENDS, load
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
PIECES = [layout.PROGRAM_TOKENS + 1, 1, 1, layout.FEW, 1, 3, layout.FEW + 1, 1, 2]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    source, _, type_ = request.param.partition(" -> ")
    path = DATA / source
    if type_:
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        convert(DATA / source, path, type_)
    return mlx_engine.load(path, "parallel", threads=2)


def passes(engine: Engine, sizes: list[int], *, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Logits of every token, and what lies in the stores; `compiled` or operation by operation."""
    model = copy.copy(engine.model)
    if not compiled:
        model.program = Backend.compile(engine.backend, model.definition)
    rows, first = [], 0
    with monkeypatch.context() as patch:
        # The cache grows on the way: stores move.
        patch.setattr(type(engine.backend), "kv_step", 16)
        cache = model.new_cache(sum(sizes))
        with engine.backend.session():
            for n in sizes:
                rows.append(model.forward(IDS[first : first + n], cache, every=n % 2 == 0))
                first += n
        stores = [view.store[:, :, view.start : view.stop] for view in cache.kv_views(0)]
    return np.concatenate(rows), stores


def pieces(context: int) -> list[int]:
    """Many until the context ends, or a window has slid, which takes all its slots."""
    rest = min(context, LENGTH) - sum(PIECES) - 3
    return [*PIECES, *[layout.FEW] * (rest // layout.FEW), 1, 2]


def test_a_program_gives_the_bits_of_the_definition(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    sizes = pieces(engine.config.context_length)
    is_compiled = engine.config.head_dim % layout.LANES == 0
    assert isinstance(engine.model.program, CompiledProgram if is_compiled else OpByOp)
    want, want_stores = passes(engine, sizes, compiled=False, monkeypatch=monkeypatch)
    found, stores = passes(engine, sizes, compiled=True, monkeypatch=monkeypatch)
    np.testing.assert_array_equal(found, want)
    for a, b in zip(stores, want_stores, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tables_of_rotations_grow_with_the_positions(monkeypatch: pytest.MonkeyPatch):
    """Their first length is 512."""
    engine, sizes = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd"), [2, 508, 1, 3, 1]
    want, _ = passes(engine, sizes, compiled=False, monkeypatch=monkeypatch)
    # Nothing shall be there that the operations have made.
    engine = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd")
    found, _ = passes(engine, sizes, compiled=True, monkeypatch=monkeypatch)
    np.testing.assert_array_equal(found, want)


def test_two_programs_of_one_backend_do_not_share_what_they_are_made_of():
    """The scale of the scores, and a norm that was replaced, are those of each program."""
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    plain = logits(model)
    for change in (scaled, renormed):
        other = copy.copy(model)
        change(other)
        other.backend = model.backend
        assert isinstance(other.program, CompiledProgram)
        changed = logits(other)
        assert np.abs(changed - plain).max() > 1e-3
        np.testing.assert_array_equal(logits(model), plain)
        np.testing.assert_array_equal(changed, logits(other))


def logits(model: Any) -> np.ndarray:
    with model.backend.session():
        return np.array(model.forward(IDS[:5], model.new_cache(8), every=True))


def scaled(model: Any) -> None:
    model.scale *= 3


def renormed(model: Any) -> None:
    norm = dataclasses.replace(model.layers[0].attn_norm, gain=3 * model.layers[0].attn_norm.gain)
    model.layers = [dataclasses.replace(model.layers[0], attn_norm=norm), *model.layers[1:]]


def test_what_the_kernels_lack_is_run_operation_by_operation():
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    last = model.layers[-1]
    bias = dataclasses.replace(last.ffn_up, bias=np.zeros(model.config.intermediate_size, np.float32))
    wide = dataclasses.replace(last.ffn_norm, gain=np.ones(layout.SCRATCH_BYTES, np.float32))
    for change in ({"ffn_up": bias}, {"ffn_norm": wide}):
        other = copy.copy(model)
        other.layers = [*model.layers[:-1], dataclasses.replace(last, **change)]
        other.backend = model.backend
        assert isinstance(other.program, OpByOp)
    assert isinstance(model.program, CompiledProgram)


def test_arrays_from_elsewhere_are_run_operation_by_operation():
    be = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").backend
    zeros, norm = np.zeros((1, 64), np.float32), RMSNorm("n", np.ones(64, np.float32), 1e-6)
    linear = Linear("w", be.prepare(Weight.pack("w", np.ones((64, 64), np.float32), BY_NAME["F32"])))

    def constant_residual(be: Any, x: Any, cache: Any, offset: Any, *, every: bool) -> Any:
        return be.project_add(be.norm_project(x, norm, (linear,))[0], linear, zeros)

    def constant_input(be: Any, x: Any, cache: Any, offset: Any, *, every: bool) -> Any:
        return be.project_add(zeros, linear, be.norm_project(x, norm, (linear,))[0])

    for definition in (constant_residual, constant_input):
        assert isinstance(be.compile(definition), OpByOp)


def test_a_cache_of_another_model_is_refused():
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    cfg = model.config
    sizes = {"n_layers": cfg.n_layers, "n_kv_heads": cfg.n_kv_heads, "head_dim": cfg.head_dim}
    for name, wrong in (("n_layers", 1), ("n_kv_heads", cfg.n_kv_heads + 1), ("head_dim", cfg.head_dim // 2)):
        cache = FullCache(model.backend, **{**sizes, name: wrong}, capacity=8)
        with pytest.raises(ValueError, match="another model"):
            model.forward(IDS[:3], cache)


def test_an_operation_that_a_subclass_overrides_is_called():
    class Refuses(CompiledBackend):
        def norm_gate_up(self, *args: Any) -> Any:
            raise NotImplementedError

    model = copy.copy(mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model)
    be = copy.copy(model.backend)
    be.__class__ = Refuses
    model.backend = be
    with pytest.raises(NotImplementedError):
        model.forward(IDS[:3], model.new_cache(4))


def test_head_norms_come_in_pairs_and_with_a_rotation():
    layer = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model.layers[0]
    for change in ({"rope": None}, {"attn_q_norm": None}, {"attn_k_norm": None}):
        with pytest.raises(ValueError, match=r"blk\.0\.attn_q: expected norms"):
            dataclasses.replace(layer, **change)


# ---- edits of the definition ----


def feed_forward_first(be: Any, w: Any, i: int, x: Any, cache: Any, *, head_dim: int, scale: float, offset: Any,
                       last_only: bool) -> Any:  # fmt: skip
    """The two halves of a layer swapped; the last token alone goes on behind attention."""
    h = be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, w.ffn_up, w.activation)
    x = be.project_add(h, w.ffn_down, x)
    q, k, v = be.norm_project(x, w.attn_norm, (w.attn_q, w.attn_k, w.attn_v))
    q, k, v = be.head_norm_rope(q, k, v, head_dim, w.head_norms, w.rope, offset)
    kv = cache.append(i, k, v)
    if last_only:
        q, x = be.last(q), be.last(x)
    return be.project_add(be.merge(be.attention(q, kv, scale)), w.attn_output, x)


def parallel_halves(be: Any, w: Any, i: int, x: Any, cache: Any, **settings: Any) -> Any:
    """Both halves read the same input, as in GPT-J; then a step more: the feed-forward network once again."""
    q, k, v = be.norm_project(x, w.attn_norm, (w.attn_q, w.attn_k, w.attn_v))
    q, k, v = be.head_norm_rope(q, k, v, settings["head_dim"], w.head_norms, w.rope, settings["offset"])
    kv = cache.append(i, k, v)
    if settings["last_only"]:
        q, x = be.last(q), be.last(x)
    y = be.project_add(be.merge(be.attention(q, kv, settings["scale"])), w.attn_output, x)
    for _ in range(2):
        y = be.project_add(be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, w.ffn_up, w.activation), w.ffn_down, y)
    return y


def scaled_hidden_states(be: Any, w: Any, i: int, x: Any, cache: Any, **settings: Any) -> Any:
    """A step that compiled programs do not have."""
    return decoder_layer(be, w, i, be.scale(x, 0.5), cache, **settings)


def odd_offsets(be: Any, w: Any, i: int, x: Any, cache: Any, *, offset: Any, **settings: Any) -> Any:
    """Arithmetic with what is a number only while the model runs."""
    return decoder_layer(be, w, i, x, cache, offset=2 * offset + 1, **settings)


def depends_on_position(be: Any, w: Any, i: int, x: Any, cache: Any, *, scale: float, offset: Any, **more: Any) -> Any:
    """A decision that is another one in the next pass."""
    return decoder_layer(be, w, i, x, cache, scale=3 * scale if offset == 0 else scale, offset=offset, **more)


def depends_on_length(be: Any, w: Any, i: int, x: Any, cache: Any, *, scale: float, **more: Any) -> Any:
    """The same, by what the cache holds."""
    return decoder_layer(be, w, i, x, cache, scale=scale if cache.length else 3 * scale, **more)


def array_of_its_own(be: Any, w: Any, i: int, x: Any, cache: Any, **settings: Any) -> Any:
    """The feed-forward network adds nothing to what it reads, but to zeros."""
    x = decoder_layer(be, w, i, x, cache, **settings)
    return be.add(x, be.project_add(be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, w.ffn_up, "gelu"), w.ffn_down, x))


COMPILED = {
    feed_forward_first: True, parallel_halves: True, scaled_hidden_states: False, odd_offsets: False,
    depends_on_position: False, depends_on_length: False, array_of_its_own: False,
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edited", COMPILED)
def test_every_backend_follows_an_edited_definition(
    edited: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
):
    path = DATA / "qwen3-micro" / "model-f32.gguf"
    plain = decoded(backend, path)
    monkeypatch.setattr(decoder, "decoder_layer", edited)
    found = decoded(backend, path)
    want = decoded("scalar", path)
    assert np.abs(found - plain).max() > 1e-2
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())
    if backend in ("simd", "parallel"):
        program = load(backend, path).model.program
        assert isinstance(program, CompiledProgram if COMPILED[edited] else OpByOp)


def decoded(backend: str, path: Path) -> np.ndarray:
    """Logits of a prompt's last token and of two tokens behind it."""
    model = load(backend, path).model
    with model.backend.session():
        cache = model.new_cache(16)
        rows = [model.forward(ids, cache) for ids in (IDS[:7], IDS[7:8], IDS[8:9])]
        return np.concatenate([model.backend.host(row) for row in rows])
