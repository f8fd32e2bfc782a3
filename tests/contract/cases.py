"""One list of cases for every operation of the seam; the answer of each is computed in float64 by `scalar`.

A case is replayable alone: its random numbers are seeded with its own id. Per operation there is at least a typical
case, an extreme one and a degenerate one, and where the layout matters an input that is not contiguous.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.parameters import LayerNorm, Linear, Norm, RMSNorm, Rope
from mlx_engine.backends.sampling import Draw, Sampling
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.random_blocks import random_blocks

Run = Callable[[Backend, np.random.Generator], Any]


@dataclass(frozen=True)
class OpCase:
    """An operation, what is special about this case, and how to run it on a backend.

    `run` draws its inputs from the generator, brings them across the seam, and returns the backend's own result.
    `rtol` bounds the Frobenius error, `atol` each element in units of the largest expected one, `each` the relative
    error of every single element; `why` gives the reason where they are not the usual ones.
    """

    op: str
    label: str
    run: Run = field(repr=False)
    rtol: float = 2e-6
    atol: float = 1e-5
    each: float | None = None
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"

    def on(self, backend: Backend) -> list[np.ndarray]:
        """The results of `backend`, on the host; most operations have one."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        with backend.session():
            result = self.run(backend, rng)
            return [as_host(backend, part) for part in (result if isinstance(result, tuple) else (result,))]


def as_host(be: Backend, value: Any) -> np.ndarray:
    return np.asarray(value) if np.isscalar(value) else be.host(value)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def weight(be: Backend, values: np.ndarray, type_name: str = "F32", name: str = "w") -> Any:
    return be.prepare(Weight.pack(name, values, BY_NAME[type_name]))


def norm_weight(be: Backend, rng: np.random.Generator, n: int) -> Any:
    return weight(be, 1 + normal(rng, n, scale=0.2))


def linear(
    be: Backend, rng: np.random.Generator, n: int, k: int, type_name: str = "F32", *, bias: bool = False
) -> Linear:
    made = weight(be, normal(rng, n, k, scale=k**-0.5), type_name)
    return Linear("w", made, weight(be, normal(rng, n)) if bias else None)


def on_rows(method: str, shape: tuple[int, ...], scale: float = 1.0) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(normal(rng, *shape, scale=scale)))


def elementwise(values: list[float], method: str) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(np.array([values], dtype=np.float32)))


def two(method: str, shape: tuple[int, int], *, transposed: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        a = normal(rng, *shape[::-1]).T if transposed else normal(rng, *shape)
        return getattr(be, method)(be.array(a), be.array(normal(rng, *shape)))

    return run


def linear_case(t: int, n: int, k: int, type_name: str = "F32", *, bias: bool = False, zero: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        layer = linear(be, rng, n, k, type_name, bias=bias)
        return be.linear(be.array(normal(rng, t, k) * (0 if zero else 1)), layer)

    return run


def blockwise_scales(be: Backend, rng: np.random.Generator) -> Any:
    """Blocks of one row whose scales differ by 10,000: reading the first scale for all of them shows."""
    values = normal(rng, 6, 128, scale=128**-0.5) * np.repeat(10.0 ** np.array([0, -2, 2, -1]), 32).astype(np.float32)
    return be.linear(be.array(normal(rng, 2, 128)), Linear("w", weight(be, values, "Q8_0")))


def stored_case(t: int, n: int, k: int, type_name: str) -> Run:
    """A product with random bytes of a format."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        layer = Linear("w", be.prepare(random_blocks(rng, "w", type_name, n, k, k**-0.5)))
        return be.linear(be.array(normal(rng, t, k)), layer)

    return run


def stored_rows(ids: list[int], type_name: str) -> Run:
    return lambda be, rng: be.embed(be.prepare(random_blocks(rng, "w", type_name, 20, 256)), ids)


def mixed_formats(t: int) -> Run:
    """As the files have it that most people have: q and k in one format, v in another."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        kinds = {"Q4_K": 48, "Q6_K": 16, "Q4_0": 17, "F32": 5}
        parts = [
            linear(be, rng, n, 256)
            if kind == "F32"
            else Linear("w", be.prepare(random_blocks(rng, "w", kind, n, 256, 1 / 16)))
            for kind, n in kinds.items()
        ]
        return tuple(
            be.norm_project(be.array(normal(rng, t, 256)), RMSNorm("n", norm_weight(be, rng, 256), 1e-6), parts)
        )

    return run


def embed(ids: list[int], type_name: str = "F32") -> Run:
    return lambda be, rng: be.embed(weight(be, normal(rng, 20, 64), type_name), ids)


def rms(shape: tuple[int, ...], scale: float = 1.0, eps: float = 1e-6) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, shape[0], int(np.prod(shape[1:])), scale=scale))
        x = be.heads(x, shape[-1]) if len(shape) == 3 else x
        return be.rms_norm(x, norm_weight(be, rng, shape[-1]), eps)

    return run


def layer_norm(shape: tuple[int, int], scale: float = 1.0, shift: float = 0.0) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, *shape, scale=scale) + np.float32(shift))
        return be.layer_norm(x, norm_weight(be, rng, shape[1]), weight(be, normal(rng, shape[1])), 1e-5)

    return run


def rope(positions: Sequence[int], heads: int, head_dim: int, theta: float = 1e4) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.heads(be.array(normal(rng, len(positions), heads * head_dim)), head_dim)
        return be.rope(x, Rope.plain(head_dim, theta), positions)

    return run


def attention(
    t: int, past: int, heads: int, kv_heads: int, head_dim: int = 16, *, window: int | None = None, scale: float = 1.0,
    page: int = 4,
) -> Run:  # fmt: skip
    """`past` tokens stored first, then t more."""
    return attention_of_batch([(past, t, t)], heads, kv_heads, head_dim, window=window, scale=scale, page=page)


def attention_of_batch(
    sequences: list[tuple[int, int, int]], heads: int, kv_heads: int, head_dim: int = 16, *,
    window: int | None = None, scale: float = 1.0, page: int = 4,
) -> Run:  # fmt: skip
    """Sequences of (past, new, queries): tokens stored first, then others, of which the last are queries.

    Pages lie in no order, with garbage in those that nobody has.
    """

    def run(be: Backend, rng: np.random.Generator) -> Any:
        store, spans = stored(be, rng, [(past, new) for past, new, _ in sequences], kv_heads, head_dim, page)
        counts = [n for _, _, n in sequences]
        q = be.heads(be.array(normal(rng, sum(counts), heads * head_dim, scale=scale)), head_dim)
        return be.attention(q, KVView(store, page, spans, window), counts, head_dim**-0.5)

    return run


def stored(
    be: Backend, rng: np.random.Generator, sequences: list[tuple[int, int]], kv_heads: int, head_dim: int, page: int
) -> tuple[Any, list[KVSpan]]:
    """A store, and where in it the keys and values of sequences of (past, new) tokens lie."""

    def split(n: int, scale: float = 1.0) -> Any:
        return be.heads(be.array(normal(rng, n, kv_heads * head_dim, scale=scale)), head_dim)

    n_pages = [-(-(past + new) // page) for past, new in sequences]
    order = rng.permutation(sum(n_pages) + 2) * page
    n_slots = page * len(order)
    store = be.kv_empty(kv_heads, head_dim, n_slots)
    store = be.kv_write(store, np.arange(n_slots), split(n_slots, 9.0), split(n_slots, 9.0))
    spans = []
    for (past, new), n, end in zip(sequences, n_pages, np.cumsum(n_pages), strict=True):
        span = KVSpan(order[end - n : end].astype(np.int64), past + new, new)
        for first, last in ((0, past), (past, past + new)):
            if last > first:
                slots = np.arange(n_slots)[span.slots(first, last, page)]
                store = be.kv_write(store, slots, split(last - first), split(last - first))
        spans.append(span)
    return store, spans


def shape_op(method: str, *arguments: Any, shape: tuple[int, ...] = (3, 8)) -> Run:
    return lambda be, rng: getattr(be, method)(be.array(normal(rng, *shape)), *arguments)


def merge(be: Backend, rng: np.random.Generator) -> Any:
    return be.merge(be.heads(be.array(normal(rng, 3, 24)), 4))


def argmax(row: list[float]) -> Run:
    return lambda be, rng: be.token_id(be.argmax(be.array(np.array([row], dtype=np.float32))))


def sample(sampling: Sampling, u: float, recent: tuple[int, ...] = ()) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        return be.token_id(be.sample(be.array(normal(rng, 1, 40, scale=2.0)), sampling, recent, u))

    return run


GREEDY = Draw(Sampling(), [], 0.0)


def choose(*draws: Draw) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        tokens = be.choose(be.array(normal(rng, len(draws), 40, scale=2.0)), draws)
        return tuple(be.token_id(token) for token in tokens)

    return run


def kv_nbytes(be: Backend, rng: np.random.Generator) -> Any:
    """Bytes differ between backends; what all promise is that an empty store has none and a filled one has some."""
    filled = be.kv_write(
        be.kv_empty(2, 4, 3), np.arange(3), *(be.heads(be.array(normal(rng, 3, 8)), 4) for _ in range(2))
    )
    return int(be.kv_nbytes(be.kv_empty(2, 4, 0)) == 0) + 2 * int(be.kv_nbytes(filled) >= 2 * 2 * 4 * 3 * 2)


def norm_of(be: Backend, rng: np.random.Generator, n: int, kind: str) -> Norm:
    if kind == "rms":
        return RMSNorm("n", norm_weight(be, rng, n), 1e-6)
    return LayerNorm("n", norm_weight(be, rng, n), weight(be, normal(rng, n)), 1e-5)


def norm(kind: str) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x = be.array(normal(rng, 3, 32))
        return be.norm(x, norm_of(be, rng, 32, kind))

    return run


def scale(shape: tuple[int, int], factor: float) -> Run:
    return lambda be, rng: be.scale(be.array(normal(rng, *shape)), factor)


def norm_project_layer(t: int) -> Run:
    """As GPT-2 has it: a norm with a mean, layers with biases."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        parts = [linear(be, rng, n, 64, bias=True) for n in (48, 16)]
        norm = norm_of(be, rng, 64, "layer")
        return tuple(be.norm_project(be.array(normal(rng, t, 64)), norm, parts))

    return run


def norm_project(t: int, rows: tuple[int, ...], type_name: str = "F32") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        parts = [linear(be, rng, n, 64, type_name) for n in rows]
        return tuple(be.norm_project(be.array(normal(rng, t, 64)), RMSNorm("n", norm_weight(be, rng, 64), 1e-6), parts))

    return run


def head_norm_rope(positions: Sequence[int], *, normed: bool) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        q, k, v = (be.array(normal(rng, len(positions), n)) for n in (64, 32, 32))
        norms = (
            (RMSNorm("q", norm_weight(be, rng, 16), 1e-6), RMSNorm("k", norm_weight(be, rng, 16), 1e-6))
            if normed
            else None
        )
        return be.head_norm_rope(q, k, v, 16, norms, Rope.plain(16, 1e4), positions)

    return run


def project_add(t: int, type_name: str = "F32", *, bias: bool = False) -> Run:
    return lambda be, rng: be.project_add(
        be.array(normal(rng, t, 64)),
        linear(be, rng, 48, 64, type_name, bias=bias),
        be.array(normal(rng, t, 48)),
    )


def project_norm_add(t: int, type_name: str = "F32", *, kind: str = "rms") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, layer = be.array(normal(rng, t, 64)), linear(be, rng, 32, 64, type_name)
        norm = norm_of(be, rng, 32, kind)
        return be.project_norm_add(x, layer, norm, be.array(normal(rng, t, 32)))

    return run


def norm_gate_up(t: int, activation: str, type_name: str = "F32", *, mixed: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, n = be.array(normal(rng, t, 64)), RMSNorm("n", norm_weight(be, rng, 64), 1e-6)
        up = linear(be, rng, 48, 64, "F32" if mixed else type_name)
        return be.norm_gate_up(x, n, linear(be, rng, 48, 64, type_name), up, activation)  # type: ignore[arg-type]

    return run


def norm_up(t: int, activation: str, type_name: str = "F32", *, kind: str = "layer") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, up = be.array(normal(rng, t, 64)), linear(be, rng, 52, 64, type_name, bias=kind == "layer")
        return be.norm_up(x, norm_of(be, rng, 64, kind), up, activation)  # type: ignore[arg-type]

    return run


def norm_head(type_name: str = "F32", *, t: int = 3, kind: str = "rms") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        x, n = be.array(normal(rng, t, 64)), norm_of(be, rng, 64, kind)
        return be.norm_head(x, n, linear(be, rng, 17, 64, type_name))

    return run


# Formats of 4 and 6 bits, not all of which can be written here.
STORED = ("Q4_0", "Q4_1", "Q4_K", "Q6_K")
EXTREMES = [-1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 0.5, 20.0, 100.0, 1e4]

CASES = [
    OpCase("embed", "rows", embed([3, 0, 19, 3])),
    OpCase("embed", "one-row", embed([7])),
    OpCase("embed", "q8_0", embed([5, 11], "Q8_0")),
    OpCase("linear", "vector", linear_case(1, 48, 64)),
    OpCase("linear", "matrix", linear_case(7, 33, 96)),
    OpCase("linear", "one-output", linear_case(2, 1, 32)),
    OpCase("linear", "bias", linear_case(3, 20, 64, bias=True)),
    OpCase("linear", "zeros", linear_case(2, 8, 32, zero=True)),
    OpCase("linear", "f16", linear_case(2, 24, 64, "F16")),
    OpCase("linear", "bf16", linear_case(2, 24, 64, "BF16")),
    OpCase("linear", "q8_0", linear_case(1, 40, 128, "Q8_0")),
    OpCase("linear", "q8_0-matrix", linear_case(9, 40, 96, "Q8_0")),
    OpCase("linear", "q8_0-few-vectors", linear_case(3, 300, 64, "Q8_0")),
    OpCase("linear", "q8_0-many-rows", linear_case(6, 300, 64, "Q8_0")),
    OpCase("linear", "q8_0-bias", linear_case(2, 24, 64, "Q8_0", bias=True)),
    OpCase("linear", "q8_0-scales-differ", blockwise_scales),
    *(OpCase("embed", kind.lower(), stored_rows([5, 0, 19], kind)) for kind in STORED),
    *(OpCase("linear", kind.lower(), stored_case(1, 40, 512, kind)) for kind in STORED),
    *(OpCase("linear", f"{kind.lower()}-few-vectors", stored_case(6, 300, 256, kind)) for kind in STORED),
    *(OpCase("linear", f"{kind.lower()}-matrix", stored_case(21, 40, 768, kind)) for kind in STORED),
    OpCase("linear", "q4_0-odd-blocks", stored_case(2, 33, 96, "Q4_0")),
    OpCase("linear", "q4_1-odd-blocks", stored_case(2, 33, 160, "Q4_1")),
    OpCase("norm_project", "mixed-formats", mixed_formats(1)),
    OpCase("norm_project", "mixed-formats-matrix", mixed_formats(19)),
    OpCase("rms_norm", "rows", rms((3, 64))),
    OpCase("rms_norm", "heads", rms((3, 4, 16))),
    OpCase("rms_norm", "tiny", rms((2, 32), scale=1e-5), why="eps outweighs the mean square"),
    OpCase("rms_norm", "huge", rms((2, 32), scale=1e6)),
    OpCase("rms_norm", "zeros", rms((2, 32), scale=0.0)),
    OpCase("layer_norm", "rows", layer_norm((3, 64))),
    OpCase("layer_norm", "far-from-zero", layer_norm((2, 64), shift=100.0), rtol=2e-5, atol=1e-4,
           why="float32 inputs near 100 carry 4e-6 of rounding against a spread of 1"),
    OpCase("layer_norm", "constant", layer_norm((2, 16), scale=0.0, shift=3.0)),
    OpCase("rope", "start", rope(range(5), 2, 8)),
    OpCase("rope", "one-token-deep", rope([4095], 4, 16)),
    OpCase("rope", "far", rope(range(40_000, 40_003), 2, 32, theta=1e6)),
    OpCase("rope", "several-sequences", rope([7, 8, 9, 0, 1, 700, 3], 2, 16)),
    OpCase("attention", "prefill", attention(6, 0, 4, 4)),
    OpCase("attention", "decode", attention(1, 9, 4, 4)),
    OpCase("attention", "chunk-in-the-middle", attention(3, 5, 4, 2)),
    OpCase("attention", "grouped", attention(4, 3, 6, 2)),
    OpCase("attention", "one-kv-head", attention(2, 4, 5, 1)),
    OpCase("attention", "first-token", attention(1, 0, 2, 2)),
    OpCase("attention", "large-scores", attention(3, 6, 2, 2, scale=300.0)),
    OpCase("attention", "window", attention(5, 4, 4, 2, window=3)),
    OpCase("attention", "window-decode", attention(1, 7, 4, 2, window=3)),
    OpCase("attention", "window-wider", attention(2, 2, 2, 1, window=50)),
    OpCase("attention", "one-page", attention(3, 9, 4, 2, page=16)),
    OpCase("attention", "pages-of-one-token", attention(2, 6, 2, 1, page=1)),
    OpCase("attention", "batch-decode", attention_of_batch([(9, 1, 1), (0, 1, 1), (30, 1, 1)], 4, 2)),
    OpCase("attention", "batch", attention_of_batch([(5, 3, 3), (0, 12, 12), (17, 1, 1)], 4, 2)),
    OpCase("attention", "batch-window", attention_of_batch([(5, 3, 3), (0, 12, 12), (17, 1, 1)], 6, 2, window=5)),
    OpCase("attention", "batch-last-queries", attention_of_batch([(5, 4, 2), (3, 2, 0), (0, 6, 1)], 4, 4, window=4)),
    OpCase("silu", "typical", on_rows("silu", (3, 40))),
    OpCase("silu", "extremes", elementwise(EXTREMES, "silu"), each=1e-6),
    OpCase("gelu", "typical", on_rows("gelu", (3, 40))),
    OpCase("gelu", "extremes", elementwise(EXTREMES, "gelu")),
    OpCase("activate", "gelu", lambda be, rng: be.activate(be.array(normal(rng, 2, 9)), "gelu")),
    OpCase("activate", "silu", lambda be, rng: be.activate(be.array(normal(rng, 2, 9)), "silu")),
    OpCase("add", "typical", two("add", (3, 20))),
    OpCase("add", "not-contiguous", two("add", (5, 8), transposed=True)),
    OpCase("multiply", "typical", two("multiply", (3, 20))),
    OpCase("multiply", "not-contiguous", two("multiply", (5, 8), transposed=True)),
    OpCase("scale", "typical", scale((3, 20), 33.941125)),
    OpCase("scale", "tiny", scale((1, 8), 1e-12)),
    OpCase("scale", "not-contiguous", lambda be, rng: be.scale(be.array(normal(rng, 8, 5).T), -2.0)),
    OpCase("heads", "split", shape_op("heads", 4)),
    OpCase("merge", "join", merge),
    OpCase("take", "last-row", shape_op("take", (2,))),
    OpCase("take", "only-row", shape_op("take", (0,), shape=(1, 8))),
    OpCase("take", "rows-apart", shape_op("take", (0, 3, 4, 6), shape=(7, 8))),
    OpCase("take", "heads", lambda be, rng: be.take(be.heads(be.array(normal(rng, 4, 24)), 4), (1, 3))),
    OpCase("argmax", "typical", argmax([0.5, 3.0, -1.0])),
    OpCase("argmax", "tie-takes-the-lowest", argmax([1.0, 7.0, 7.0, 7.0])),
    OpCase("argmax", "all-negative", argmax([-5.0, -2.0, -9.0])),
    OpCase("sample", "plain", sample(Sampling(temperature=1.0), 0.37)),
    OpCase("sample", "first", sample(Sampling(temperature=1.5), 0.0)),
    OpCase("sample", "last", sample(Sampling(temperature=1.5), 1 - 2**-53)),
    OpCase("sample", "top-k", sample(Sampling(temperature=2.0, top_k=3), 0.99)),
    OpCase("sample", "top-p", sample(Sampling(temperature=1.0, top_p=0.5), 0.99)),
    OpCase("sample", "min-p", sample(Sampling(temperature=1.0, min_p=0.3), 0.99)),
    OpCase("sample", "penalty", sample(Sampling(temperature=1.0, repetition_penalty=5.0), 0.8, (1, 2, 30, 31, 32))),
    OpCase("sample", "greedy-with-penalty", sample(Sampling(repetition_penalty=1e6), 0.5, tuple(range(0, 40, 2)))),
    OpCase("sample", "cold", sample(Sampling(temperature=1e-9), 0.5)),
    OpCase("choose", "one", choose(GREEDY)),
    OpCase("choose", "each-its-own", choose(GREEDY, Draw(Sampling(1.0), [], 0.7), Draw(Sampling(2.0, 3), [], 0.1),
           Draw(Sampling(repetition_penalty=1e6), list(range(0, 40, 2)), 0.0), GREEDY)),
    OpCase("kv_nbytes", "law", kv_nbytes),
    OpCase("norm", "rms", norm("rms")),
    OpCase("norm", "layer", norm("layer")),
    OpCase("norm_project", "qkv", norm_project(3, (48, 16, 16))),
    OpCase("norm_project", "q8_0", norm_project(1, (48, 17, 17), "Q8_0")),
    OpCase("norm_project", "q8_0-matrix", norm_project(9, (48, 17, 17), "Q8_0")),
    OpCase("norm_project", "q8_0-two", norm_project(3, (48, 17), "Q8_0")),
    OpCase("norm_project", "layer-norm-and-biases", norm_project_layer(3)),
    OpCase("norm_project", "layer-norm-and-biases-vector", norm_project_layer(1)),
    OpCase("head_norm_rope", "normed", head_norm_rope(range(2, 5), normed=True)),
    OpCase("head_norm_rope", "plain", head_norm_rope([7], normed=False)),
    OpCase("head_norm_rope", "several-sequences", head_norm_rope([40, 41, 0, 3, 1000], normed=True)),
    OpCase("project_add", "vector", project_add(1)),
    OpCase("project_add", "matrix", project_add(5)),
    OpCase("project_add", "q8_0", project_add(1, "Q8_0")),
    OpCase("project_add", "q8_0-few", project_add(3, "Q8_0")),
    OpCase("project_add", "q8_0-matrix", project_add(9, "Q8_0")),
    OpCase("project_add", "q8_0-bias", project_add(1, "Q8_0", bias=True)),
    OpCase("project_norm_add", "vector", project_norm_add(1)),
    OpCase("project_norm_add", "matrix", project_norm_add(9)),
    OpCase("project_norm_add", "q8_0", project_norm_add(1, "Q8_0")),
    OpCase("project_norm_add", "q8_0-matrix", project_norm_add(9, "Q8_0")),
    OpCase("project_norm_add", "layer", project_norm_add(2, kind="layer")),
    OpCase("norm_gate_up", "silu", norm_gate_up(1, "silu")),
    OpCase("norm_gate_up", "gelu", norm_gate_up(4, "gelu")),
    OpCase("norm_gate_up", "q8_0", norm_gate_up(1, "silu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-gelu", norm_gate_up(3, "gelu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-matrix", norm_gate_up(9, "silu", "Q8_0")),
    OpCase("norm_gate_up", "q8_0-and-f32", norm_gate_up(1, "silu", "Q8_0", mixed=True)),
    OpCase("norm_up", "gelu", norm_up(1, "gelu")),
    OpCase("norm_up", "gelu-matrix", norm_up(9, "gelu")),
    OpCase("norm_up", "q8_0", norm_up(3, "gelu", "Q8_0")),
    OpCase("norm_up", "q8_0-matrix", norm_up(17, "gelu", "Q8_0")),
    OpCase("norm_up", "silu-behind-rms", norm_up(2, "silu", kind="rms")),
    OpCase("norm_head", "one-row", norm_head(t=1)),
    OpCase("norm_head", "rows", norm_head()),
    OpCase("norm_head", "layer", norm_head(t=9, kind="layer")),
    OpCase("norm_head", "q8_0-one-row", norm_head("Q8_0", t=1)),
    OpCase("norm_head", "q8_0", norm_head("Q8_0")),
    OpCase("norm_head", "q8_0-many-rows", norm_head("Q8_0", t=9)),
]  # fmt: skip
