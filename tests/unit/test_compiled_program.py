"""Compiled programs give the bits of the definition run operation by operation, and follow whoever edits it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from kernels.cpu.build import layout
from mlx_engine.backends.base import Backend, OpByOp, Program
from mlx_engine.backends.batch import Wanted
from mlx_engine.backends.cpu.backend import CompiledBackend, CompiledProgram
from mlx_engine.backends.cpu.lowering import LOWERED, Lowering
from mlx_engine.backends.parameters import Linear, RMSNorm, Rope
from mlx_engine.cache import KVPool, KVSequence, SequenceInput
from mlx_engine.engine import Engine
from mlx_engine.loop.forward import forward
from mlx_engine.models import decoder
from mlx_engine.models.layer import RowNorms, decoder_layer
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.contract.check import BACKENDS, load
from tests.golden.convert import convert

DATA = Path(__file__).parents[1] / "data"
# Each is a file as it is there, or a folder and what it is converted to.
CHECKPOINTS = [
    *(str(path.relative_to(DATA)) for path in sorted(DATA.glob("*/model-*.gguf"))),
    *(
        f"{name}-micro/hf -> {type_}"
        for name in ("gemma2", "gemma3", "gpt2", "llama", "qwen2")
        for type_ in ("F32", "Q8_0")
    ),
    *(f"{name}-micro/hf -> Q8_0" for name in ("mixtral", "qwen2moe", "qwen3moe")),
]
# More than two blocks of keys. Gemma's window is 8: of a page of 16 tokens that has left it, another one is made.
LENGTH, PAGE = 290, 16
IDS = np.random.default_rng(0).integers(0, 60, 600).tolist()
PIECES = [layout.PROGRAM_TOKENS + 1, 1, 1, layout.SMALL_BATCH, 1, 3, layout.SMALL_BATCH + 1, 1, 2]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    source, _, type_ = request.param.partition(" -> ")
    path = DATA / source
    if type_:
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        convert(DATA / source, path, type_)
    return mlx_engine.load(path, "parallel", threads=2)


# Of each sequence of a pass, its new tokens and how many of the last ones logits are wanted of; None is all.
Passes = list[list[tuple[int, int | None]]]


def run(engine: Engine, passes: Passes, *, compiled: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits of all passes, and the contents of the stores; `compiled` or operation by operation."""
    model = copy.copy(engine.model)
    if not compiled:
        model.program = Backend.compile(engine.backend, model.definition, model.width)
    n_sequences = max(map(len, passes))
    ends, rows = [100 * i for i in range(n_sequences)], []
    pool = model.new_pool(sum(n for new in passes for n, _ in new), n_sequences=n_sequences, page=PAGE)
    sequences = [pool.sequence() for _ in range(n_sequences)]
    with engine.backend.session():
        for new in passes:
            parts = [
                SequenceInput(IDS[end : end + n], kv, wanted)
                for end, kv, (n, wanted) in zip(ends, sequences, new, strict=False)
                if n
            ]
            logits = forward(model, *parts)
            rows += [] if logits is None else [logits]
            ends = [end + n for end, (n, _) in zip(ends, new, strict=True)]
    return np.concatenate(rows), [kept for kv in sequences for kept in keys_and_values(kv)]


def keys_and_values(kv: KVSequence) -> list[np.ndarray]:
    """What a later token may see of a sequence, by layer."""
    stores, found = kv.pool.stores, []
    for layer, store in enumerate(stores.layers):
        group = stores.group_of[layer]
        n = min(kv.length, kv.pool.windows[group] or kv.length)
        found.append(store[:, :, kv.slots(group, kv.length - n, n)])
    return found


def check_same_bits(engine: Engine, passes: Passes) -> None:
    want, want_stores = run(engine, passes, compiled=False)
    found, stores = run(engine, passes, compiled=True)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(found, want)
    for a, b in zip(stores, want_stores, strict=True):
        np.testing.assert_array_equal(a, b)


def alone(sizes: list[int]) -> Passes:
    """One sequence, now with one row that is wanted and now with all."""
    return [[(n, None if n % 2 == 0 else 1)] for n in sizes]


def pieces(context: int) -> list[int]:
    """Many until the context ends, or there are several blocks of keys."""
    rest = min(context, LENGTH) - sum(PIECES) - 3
    return [*PIECES, *[layout.SMALL_BATCH] * (rest // layout.SMALL_BATCH), 1, 2]


@pytest.mark.some(2)
def test_a_program_gives_the_bits_of_the_definition(engine: Engine):
    is_compiled = engine.config.head_dim % layout.LANES == 0
    assert isinstance(engine.model.program, CompiledProgram if is_compiled else OpByOp)
    check_same_bits(engine, alone(pieces(engine.config.context_length)))


@pytest.mark.some(2)
def test_a_batch_gives_the_bits_of_the_definition(engine: Engine):
    """Prompts and single tokens side by side; of some sequences no logits are wanted, or no tokens are there."""
    check_same_bits(engine, [
        [(9, 1), (40, 0), (1, 1)],
        [(1, 1), (30, 3), (1, 1)],
        [(1, 1), (1, 1), (1, 1)],
        [(1, 1), (0, 0), (4, None)],
        [(3, 0), (2, 0), (1, 0)],
        [(2, None), (1, None), (5, None)],
        [(1, 1), (1, 0), (50, 2)],
    ])  # fmt: skip


def test_tables_of_rotations_grow_with_the_positions():
    """Their first length is 512."""
    engine, passes = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd"), alone([2, 508, 1, 3, 1])
    want, _ = run(engine, passes, compiled=False)
    # Nothing shall be there that the operations have made.
    engine = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd")
    found, _ = run(engine, passes, compiled=True)
    np.testing.assert_array_equal(found, want)


def test_a_program_follows_the_pool_that_a_batch_comes_from():
    """Memory of other sizes, at other addresses, in turns."""
    model = mlx_engine.load(DATA / "gemma3-micro" / "hf", "simd").model
    want = logits(model)
    pools = [model.new_pool(40 * n, page=n, n_sequences=n) for n in (1, 3, 7)]
    for _ in range(2):
        for pool in pools:
            with model.backend.session():
                np.testing.assert_array_equal(
                    forward(model, SequenceInput(IDS[:5], pool.sequence(), wanted=None)), want
                )


def test_two_programs_of_one_backend_do_not_share_what_they_are_made_of():
    """The scale of the scores, and a norm that was replaced, are those of each program."""
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    plain = logits(model)
    for change in (scaled, renormed):
        other = copy.copy(model)
        change(other)
        other.run_on(model.backend)
        assert isinstance(other.program, CompiledProgram)
        changed = logits(other)
        assert np.abs(changed - plain).max() > 1e-3
        np.testing.assert_array_equal(logits(model), plain)
        np.testing.assert_array_equal(changed, logits(other))


def logits(model: Any) -> np.ndarray:
    with model.backend.session():
        return np.array(forward(model, SequenceInput(IDS[:5], model.new_kv(8), wanted=None)))


def tripled(w: Any) -> Any:
    """Return a layer with three times the scale of the scores."""
    return w.with_mixers(lambda m: replace(m, scores=replace(m.scores, scale=3 * m.scores.scale)))


def scaled(model: Any) -> None:
    model.layers = [tripled(w) for w in model.layers]


def renormed(model: Any) -> None:
    norm = replace(model.layers[0].norm, weight=3 * model.layers[0].norm.weight)
    model.layers = [replace(model.layers[0], norm=norm), *model.layers[1:]]


def test_what_the_kernels_lack_is_run_operation_by_operation():
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    last = model.layers[-1]
    wide = replace(last.ffn.norm, weight=np.ones(layout.SCRATCH_BYTES, np.float32))
    other = copy.copy(model)
    other.layers = [*model.layers[:-1], replace(last, ffn=replace(last.ffn, norm=wide))]
    other.run_on(model.backend)
    assert isinstance(other.program, OpByOp)
    assert isinstance(model.program, CompiledProgram)


def test_arrays_from_elsewhere_are_run_operation_by_operation():
    be = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").backend
    zeros, norm = np.zeros((1, 64), np.float32), RMSNorm("n", np.ones(64, np.float32), 1e-6)
    linear = Linear("w", be.prepare(Weight.pack("w", np.ones((64, 64), np.float32), BY_NAME["F32"])))

    def constant_residual(be: Any, x: Any, batch: Any, *, want: Wanted) -> Any:
        return be.project_add(be.norm_project(x, norm, (linear,))[0], linear, zeros)

    def constant_input(be: Any, x: Any, batch: Any, *, want: Wanted) -> Any:
        return be.project_add(zeros, linear, be.norm_project(x, norm, (linear,))[0])

    for definition in (constant_residual, constant_input):
        assert isinstance(be.compile(definition, 64), OpByOp)


def test_keys_and_values_of_another_model_are_refused():
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model
    layer, *others = model.kv_layers
    more, narrower = replace(layer, n_kv_heads=layer.n_kv_heads + 1), replace(layer, head_dim=layer.head_dim // 2)
    for wrong in ([layer], [more, *others], [*others, narrower], [layer, layer, *others]):
        kv = KVPool(model.backend, wrong, 8).sequence()
        with pytest.raises(
            ValueError, match=r"KV stores of f32: expected \(arrays, KV heads, row length\) by layer .*, found"
        ):
            forward(model, SequenceInput(IDS[:3], kv))
        assert (kv.length, kv.pending) == (0, 0)


def test_an_operation_that_a_subclass_overrides_is_called():
    class Refuses(CompiledBackend):
        def norm_gate_up(self, *args: Any) -> Any:
            raise NotImplementedError

    model = copy.copy(mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model)
    be = copy.copy(model.backend)
    be.__class__ = Refuses
    model.run_on(be)
    with pytest.raises(NotImplementedError):
        forward(model, SequenceInput(IDS[:3], model.new_kv(4)))


def changed_attention(**parts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a model whose layers have other parts of attention, compiled and operation by operation."""
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-f32.gguf", "simd").model
    model.layers = [
        w.with_mixers(lambda m: replace(m, **{k: make(m) for k, make in parts.items()})) for w in model.layers
    ]
    model.run_on(model.backend)
    assert isinstance(model.program, CompiledProgram)
    compiled = logits(model)
    model.program = OpByOp(model.backend, model.definition)
    return compiled, logits(model)


def test_parts_of_attention_can_be_combined():
    """Head norms without a rotation, and norms of rows together with a norm of the input and a gate."""
    alone, composed = changed_attention(rope=lambda w: None)
    np.testing.assert_array_equal(alone, composed)
    np.testing.assert_array_equal(alone, changed_attention(rope=lambda w: Rope.none(w.head_dim))[0])
    assert np.abs(alone - changed_attention(rope=lambda w: None, norms=lambda w: None)[0]).max() > 1e-3

    def ones(linear: Linear) -> RMSNorm:
        return RMSNorm(linear.name, np.ones(linear.weight.shape[0], np.float32), 1e-6)

    def norms(w: Any) -> RowNorms:
        return RowNorms(ones(w.q), ones(w.k))

    found, composed = changed_attention(norms=norms, gate=lambda w: w.q)
    np.testing.assert_array_equal(found, composed)
    assert np.abs(found - changed_attention(norms=norms)[0]).max() > 1e-3


# ---- edits of the definition ----


def attended(
    be: Any, w: Any, i: int, x: Any, batch: Any, *, want: Wanted, positions: Any = None,
    rows: Any = None, counts: Any = None, **_: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Return x with what attention adds to it, and x itself; positions, rows and counts are the batch's if not given.

    Where no logits are wanted, what is returned has no meaning.
    """
    q, k, v = be.norm_project(x, w.norm, (w.mix.q, w.mix.k, w.mix.v))
    q, k, v = be.head_norm_rope(q, k, v, w.mix.head_dim, w.mix.norms, w.mix.rope, positions or batch.positions)
    kv, n_queries = be.kv_append(batch, i, k, v), batch.lengths
    if want == "none":
        return x, x
    if want == "some":
        rows = rows or batch.rows
        q, x, n_queries = be.take(q, rows), be.take(x, rows), counts or batch.wanted
    return be.project_add(be.merge(be.attention(q, kv, n_queries, w.mix.scores)), w.branches[0].out, x), x


def fed_forward(be: Any, w: Any, x: Any, residual: Any) -> Any:
    return be.project_add(be.norm_gate_up(x, w.ffn.norm, w.ffn.gate, w.ffn.up, w.ffn.activation), w.ffn.down, residual)


def feed_forward_first(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """The two halves of a layer swapped; the wanted tokens alone go on behind attention."""
    return attended(be, w, i, fed_forward(be, w, x, x), batch, **settings)[0]


def parallel_halves(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """Both halves read the same input, as in GPT-J; then a step more: the feed-forward network once again."""
    y, x = attended(be, w, i, x, batch, **settings)
    return fed_forward(be, w, x, fed_forward(be, w, x, y))


def capped_hidden_states(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """A step that compiled programs do not have."""
    return decoder_layer(be, w, i, be.soft_cap(x, 30.0), batch, **settings)


def odd_positions(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """Arithmetic with what is a number only while the model runs."""
    odd = tuple(2 * position + 1 for position in batch.positions)
    return decoder_layer(be, w, i, x, replace(batch, positions=odd), **settings)


def depends_on_position(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """A decision that is another one in the next pass."""
    return decoder_layer(be, tripled(w) if batch.positions[0] == 0 else w, i, x, batch, **settings)


def depends_on_length(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """The same, by how many tokens there are of the sequence."""
    is_first = batch.group(i).spans[0].length == batch.lengths[0]
    return decoder_layer(be, tripled(w) if is_first else w, i, x, batch, **settings)


def array_of_its_own(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """The feed-forward network adds nothing to what it reads, but to zeros."""
    x = decoder_layer(be, w, i, x, batch, **settings)
    return be.add(x, be.project_add(be.norm_gate_up(x, w.ffn.norm, w.ffn.gate, w.ffn.up, "gelu"), w.ffn.down, x))


def first_row(be: Any, w: Any, i: int, x: Any, batch: Any, *, want: Wanted, **settings: Any) -> Any:
    """The last layer adds what the feed-forward network makes of the first token of the pass, which nobody wants."""
    y = decoder_layer(be, w, i, x, batch, want=want, **settings)
    return fed_forward(be, w, be.take(x, (0,)), y) if want == "some" else y


def one_query(be: Any, w: Any, i: int, x: Any, batch: Any, **settings: Any) -> Any:
    """The last layer attends with one query, however many are wanted, and with other scores."""
    return fed_forward(be, w, *attended(be, tripled(w), i, x, batch, counts=(1,), **settings))


COMPILED = {
    feed_forward_first: True, parallel_halves: True, capped_hidden_states: False, odd_positions: False,
    depends_on_position: False, depends_on_length: False, array_of_its_own: False, first_row: False, one_query: False,
}  # fmt: skip


# Where no program is compiled, every edit is run by the same loop over the layers.
LOOPED = (feed_forward_first, depends_on_position, first_row)
EDITED = [
    pytest.param(edited, backend, marks=[] if is_compiled or edited in LOOPED else pytest.mark.slow)
    for edited in COMPILED
    for backend in BACKENDS
    if backend != "scalar"
    for is_compiled in [backend in ("simd", "parallel")]
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("edited", "backend"), EDITED)
def test_every_backend_follows_an_edited_definition(
    edited: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
):
    want = decoded_by_scalar(edited)
    assert np.abs(want - decoded_by_scalar(decoder_layer)).max() > 1e-2
    monkeypatch.setattr(decoder, "decoder_layer", edited)
    model = load(backend, EDITED_MODEL).model
    np.testing.assert_allclose(decoded(model), want, rtol=0, atol=2e-5 * np.abs(want).max())
    if backend in ("simd", "parallel"):
        assert isinstance(model.program, CompiledProgram if COMPILED[edited] else OpByOp)


EDITED_MODEL = DATA / "qwen3-micro" / "model-f32.gguf"


@cache
def decoded_by_scalar(layer: Callable[..., Any]) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "decoder_layer", layer)
        return decoded(load("scalar", EDITED_MODEL).model)


def decoded(model: Any) -> np.ndarray:
    """Logits of a prompt's last token and of a token behind it."""
    with model.backend.session():
        kv = model.new_kv(16)
        rows = [forward(model, SequenceInput(ids, kv)) for ids in (IDS[:5], IDS[5:6])]
        return np.concatenate([model.backend.host(row) for row in rows])


# Layers that the kernels would run with the positions, rows, counts and slots of the batch, whatever they say.
NOT_OF_THE_BATCH: dict[str, Callable[..., Any]] = {
    "positions": partial(attended, i=0, positions=(9,)),
    "rows": partial(attended, i=0, rows=(0,)),
    "counts": partial(attended, i=0, counts=(1,)),
    "batch": lambda be, w, x, batch, **more: attended(be, w, 0, x, batch._replace(lengths=(1,)), **more),
    "a layer twice": lambda be, w, x, batch, **more: attended(
        be, w, 0, attended(be, w, 0, x, batch, **{**more, "want": "every"})[0], batch, **more
    ),
}


@pytest.mark.parametrize("what", NOT_OF_THE_BATCH)
def test_what_is_not_the_batchs_is_run_operation_by_operation(what: str):
    model = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").model

    def compiled(layer: Callable[..., Any]) -> Program:
        settings = {"w": model.layers[0]}
        return model.backend.compile(
            lambda be, x, batch, *, want: layer(be, x=x, batch=batch, want=want, **settings)[0], model.width
        )

    assert isinstance(compiled(partial(attended, i=0)), CompiledProgram)
    assert isinstance(compiled(NOT_OF_THE_BATCH[what]), OpByOp)


def test_an_operation_without_a_step_is_the_reason_that_is_logged(caplog: pytest.LogCaptureFixture):
    be = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").backend
    with caplog.at_level("INFO", "mlx_engine"):
        program = be.compile(lambda be, x, batch, *, want: be.silu(x), 64)
    assert (type(program), program.reason) == (OpByOp, "the operation silu")
    assert [(r.message, vars(r)["fields"]["reason"]) for r in caplog.records] == [("op_by_op", "the operation silu")]


@pytest.mark.parametrize("branch", [bool, lambda x: x == x, lambda x: x + x, lambda x: x.shape])
def test_a_definition_that_reads_a_value_runs_operation_by_operation(branch: Callable[[Any], object]):
    be = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd").backend

    def definition(be: Any, x: Any, batch: Any, *, want: Wanted) -> Any:
        branch(x)
        return be.scale(x, 2.0)

    assert str(be.compile(definition, 64).reason).startswith("a definition that needs arrays")
    branch = id
    assert isinstance(be.compile(definition, 64), CompiledProgram)


@pytest.mark.parametrize("op", LOWERED)
def test_a_step_has_the_arguments_of_the_operation(op: str):
    theirs, ours = (list(signature(getattr(kind, op)).parameters.values()) for kind in (Backend, Lowering))
    assert [(of.name, of.default, of.kind) for of in ours] == [(of.name, of.default, of.kind) for of in theirs]
