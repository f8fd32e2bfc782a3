"""Test cases of all Metal kernels: arguments and expected results.

The tests run some cases of each kernel; the command `kernels check` runs all cases, on any executor. The sizes include
the edge cases: one row, odd numbers of rows, one block, rows that end inside the 128 columns that a SIMD-group reads at
once, and rows whose columns are summed in one, two and four segments (`products.h.metal`). There are one to many
vectors x, of all types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from ..launch import Launch, planned
from . import (
    attention,
    dense,
    dequantize,
    embed_rows,
    head_norm_rope,
    matvec,
    norm_gate_up,
    norm_project,
    norm_qkv,
    norm_rows,
    project_add,
    prompt_product,
    prompt_product_tensors,
    simd_per_row,
    thread_per_output,
    tiles,
)
from .formats import (
    DTYPES,
    GROUPS,
    KINDS,
    Q8_0Matrix,
    affine_layout,
    join_affine,
    split_q4_0,
    split_q4_k,
    split_q6_k,
    split_q8_0,
)
from .layout import AffineMatrix, StoredMatrix, word
from .reference import Expected

_BLOCKS: dict[str, tuple[int, Callable[[NDArray[np.uint8], tuple[int, int]], StoredMatrix]]] = {
    "Q4_0": (32, split_q4_0),
    "Q4_K": (256, split_q4_k),
    "Q6_K": (256, split_q6_k),
}
# (bits, group size, type of scales). For 4 and for 8 bits, each group size and each type of scales occurs once.
AFFINE = ((4, 64, "F16"), (4, 32, "BF16"), (8, 64, "BF16"), (4, 128, "F32"), (8, 32, "F32"), (8, 128, "F16"))
TYPES = (*_BLOCKS, *(affine_layout(*of).name for of in AFFINE))


def matrix(rng: np.random.Generator, n_rows: int, n_columns: int) -> Q8_0Matrix:
    """Return a random Q8_0 matrix, with scales of both signs, some subnormal, some 0."""
    made = np.empty(n_rows * n_columns // 32, blocks.Q8_0)
    made["qs"] = rng.integers(-128, 128, made["qs"].shape)
    made["d"] = _scales(rng, len(made))
    return split_q8_0(made.view(np.uint8), (n_rows, n_columns))


def stored(rng: np.random.Generator, n_rows: int, n_columns: int, type_: str) -> StoredMatrix:
    """Return a random matrix of Q8_0, Q4_0, Q4_K, Q6_K or an affine type."""
    shape = n_rows, n_columns
    if type_ == "Q8_0":
        return matrix(rng, n_rows, n_columns)
    if type_ in _BLOCKS:
        size, split = _BLOCKS[type_]
        kind = getattr(blocks, type_)
        made = rng.integers(0, 256, n_rows * n_columns // size * kind.itemsize, dtype=np.uint8).view(kind)
        for name in [name for name in kind.names if name in ("d", "dmin")]:
            made[name] = _scales(rng, len(made))
        return split(made.view(np.uint8), shape)
    bits, group, scale = next(of for of in product(KINDS, GROUPS, DTYPES) if affine_layout(*of).name == type_)
    quants = rng.integers(0, 256, n_rows * n_columns * bits // 8, dtype=np.uint8)
    n = n_rows * n_columns // group
    parts = [_bytes(_scales(rng, n).astype(np.float32), scale) for _ in range(2)]
    return join_affine(affine_layout(bits, group, scale), shape, quants, *parts)


def affine(rng: np.random.Generator, n_rows: int, n_columns: int, of: tuple[int, int], dtype: mx.Dtype) -> AffineMatrix:
    """Return a random `AffineMatrix`; `of` is (bits, group size), and `dtype` the type of scales and biases."""
    bits, group = of
    wq = rng.integers(0, 2**32, (n_rows, n_columns * bits // 32), dtype=np.uint32)
    parts = (_scales(rng, n_rows * n_columns // group).reshape(n_rows, -1).astype(np.float32) for _ in range(2))
    scales, biases = (mx.array(part).astype(dtype) for part in parts)
    return AffineMatrix(mx.array(wq), scales, biases, group, bits)


def _scales(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    scales = rng.standard_normal(n) * 10.0 ** rng.integers(-4, -1, n)
    scales[rng.random(n) < 0.02] = 0
    return scales


def _bytes(values: NDArray[np.float32], scale: str) -> NDArray[np.uint8]:
    if scale == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"F16": np.float16, "F32": np.float32}[scale]).view(np.uint8)


Arguments: TypeAlias = tuple[Any, ...]

# (N, K, V, type of x): rows and columns of the matrix, number and type of the vectors x.
SHAPES = [
    (1, 32, 1, "float32"), (1, 32, 8, "float16"), (2, 64, 1, "float16"), (3, 96, 2, "float32"),
    (4, 32, 3, "float16"), (5, 160, 4, "float32"), (7, 32, 5, "float32"), (8, 256, 1, "float16"),
    (9, 544, 6, "float16"), (13, 96, 7, "float32"), (16, 512, 1, "float32"), (17, 800, 8, "float32"),
    (23, 480, 1, "float16"), (31, 1024, 8, "float16"), (32, 1056, 1, "float32"), (33, 544, 2, "float16"),
    (37, 2080, 3, "float32"), (41, 2048, 1, "float16"), (65, 4096, 4, "float16"), (77, 1568, 8, "float32"),
    (100, 3072, 1, "float32"), (127, 1024, 1, "float16"), (129, 512, 2, "float32"), (255, 288, 1, "float16"),
    (513, 64, 1, "float32"), (1023, 32, 5, "float16"), (3, 5120, 1, "float32"), (1, 4128, 6, "float16"),
]  # fmt: skip
# As SHAPES, but with more than eight vectors: a SIMD-group multiplies at most eight (`MOST_VECTORS` in rows.py).
MORE = [
    (5, 96, 9, "float32"), (18, 544, 16, "float32"), (33, 2080, 17, "float32"), (7, 4128, 24, "float32"),
    (130, 64, 33, "float32"), (1, 32, 12, "float32"),
]  # fmt: skip
# For the kernel `tiles`: some sizes are whole tiles of 64 rows by 32 vectors.
MANY = [
    (1, 32, 1, "float32"), (3, 96, 9, "float16"), (5, 160, 16, "float32"), (7, 32, 17, "float32"),
    (8, 256, 33, "float16"), (9, 544, 2, "float16"), (13, 96, 31, "float32"), (16, 288, 15, "float32"),
    (17, 800, 8, "float32"), (23, 480, 64, "float16"), (31, 1024, 11, "float16"), (32, 32, 100, "float32"),
    (33, 544, 12, "float16"), (37, 2080, 3, "float32"), (41, 64, 40, "float16"), (63, 96, 32, "float32"),
    (64, 64, 32, "float32"), (64, 288, 16, "float16"), (65, 128, 48, "float16"), (77, 1568, 10, "float32"),
    (100, 160, 19, "float32"), (127, 256, 7, "float16"), (128, 512, 64, "float32"), (129, 64, 65, "float16"),
    (255, 32, 5, "float32"), (513, 64, 1, "float16"),
]  # fmt: skip
# For the kernels of prompts: partial and whole tiles of 64 rows by 64 vectors.
PROMPTS = [
    (1, 32, 1, "float16"), (3, 96, 33, "bfloat16"), (5, 160, 64, "float16"), (7, 32, 65, "bfloat16"),
    (8, 256, 32, "float16"), (9, 96, 40, "bfloat16"), (13, 96, 47, "float16"), (16, 288, 32, "bfloat16"),
    (17, 128, 129, "float16"), (23, 96, 7, "bfloat16"), (31, 64, 63, "float16"), (32, 32, 100, "bfloat16"),
    (33, 544, 34, "float16"), (37, 64, 128, "bfloat16"), (63, 96, 64, "float16"), (64, 64, 64, "bfloat16"),
    (64, 32, 63, "float16"), (65, 128, 48, "float16"), (77, 96, 2, "bfloat16"), (127, 32, 64, "float16"),
    (129, 64, 65, "bfloat16"), (193, 32, 33, "float16"),
]  # fmt: skip
# (bits, group size) of `AffineMatrix` cases.
GROUPED = [(4, 64), (8, 32)]
Q8_0 = "Q8_0"
# As SHAPES, for types other than Q8_0: K is a multiple of each type's block size.
TYPED = [(5, 512, 1, "float32"), (9, 2304, 6, "float16"), (7, 256, 2, "float32")]
# For each shape in TYPED: the types of the matrices q, k and v.
MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("AFFINE4_G64_F16", "Q4_0", "AFFINE8_G64_BF16"), ("Q6_K", "Q6_K", "Q6_K")]
# (T, H, G, E, type of q, k and v, whether heads are normed): tokens, query heads, KV heads, head dim.
HEADS = [
    (tokens, n_heads, n_kv_heads, head_dim, ("float32", "float16")[i % 2], i % 3 != 0)
    for i, (tokens, n_heads, n_kv_heads, head_dim) in enumerate([
        (1, 1, 1, 8), (1, 16, 8, 128), (1, 2, 1, 64), (1, 3, 3, 80), (1, 4, 2, 256), (1, 5, 1, 14), (2, 1, 1, 8),
        (2, 4, 2, 64), (2, 6, 3, 10), (3, 1, 1, 66), (3, 2, 2, 128), (3, 7, 1, 32), (4, 4, 4, 96), (5, 3, 1, 256),
        (5, 8, 2, 62), (7, 1, 1, 130), (7, 2, 1, 16), (8, 4, 1, 48), (9, 6, 2, 12), (11, 2, 2, 72), (13, 4, 2, 64),
        (16, 1, 1, 100), (17, 3, 1, 64), (31, 2, 1, 26), (33, 1, 1, 18), (40, 2, 1, 128),
    ])
]  # fmt: skip

# (H, G, E, page size, window, lengths of the sequences). `_paged` chooses up to three query positions per sequence.
PAGED = [
    (1, 1, 8, 16, 0, [1]), (2, 1, 8, 1, 0, [9]), (4, 2, 64, 16, 0, [33]), (4, 4, 16, 64, 0, [64, 65]),
    (6, 2, 24, 5, 0, [31, 32, 1]), (8, 2, 128, 16, 0, [257]), (8, 1, 128, 64, 0, [300, 40]), (2, 2, 256, 256, 0, [70]),
    (16, 2, 32, 16, 0, [17, 5]), (3, 1, 40, 16, 0, [129]), (2, 1, 96, 32, 0, [96, 3]), (5, 5, 72, 7, 0, [20]),
    (1, 1, 8, 16, 1, [20]), (2, 1, 64, 16, 5, [40, 2]), (4, 2, 48, 16, 32, [100]), (2, 2, 16, 64, 33, [99, 64]),
    (4, 1, 128, 16, 64, [290]), (6, 3, 8, 256, 100, [300]), (2, 1, 256, 16, 31, [64]), (8, 8, 80, 3, 10, [11, 12]),
    (2, 1, 104, 64, 500, [40]), (4, 4, 112, 16, 0, [550]), (12, 1, 16, 16, 0, [260, 256]), (1, 1, 64, 16, 256, [530]),
    (7, 1, 88, 16, 7, [30]), (2, 2, 248, 64, 0, [50, 1]),
]  # fmt: skip
# As PAGED, but keys and values are float16. `load_head` reads the heads of 24 elements one element at a time, and the
# wider heads here four at a time.
HALVES = [
    (4, 2, 64, 16, 0, [33]), (6, 2, 24, 5, 0, [31, 32, 1]), (8, 1, 128, 64, 0, [300, 40]), (4, 1, 128, 16, 64, [290]),
    (2, 2, 256, 256, 0, [70]), (4, 2, 32, 16, 0, [3, 2, 1]),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel, its reference and its random inputs. Each method generates the inputs again, with the same values.

    Attributes:
        label: description of the case, unique within the kernel.
        call: the Python function that launches the kernel.
        reference: function that returns the expected results in float64, with error bounds.
        make: function that returns the arguments of `call` and `reference`.
    """

    kernel: str
    label: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[[np.random.Generator], Arguments]

    def arguments(self) -> Arguments:
        """Return the arguments of `call` and `reference`."""
        return self.make(np.random.default_rng(crc32(f"{self.kernel} {self.label}".encode())))

    def outputs(self) -> list[mx.array]:
        """Return the outputs of the kernel on the current executor."""
        found = self.call(*self.arguments())
        return [found] if isinstance(found, mx.array) else list(found)

    def expected(self) -> list[Expected]:
        """Return the expected outputs and their error bounds."""
        found = self.reference(*self.arguments())
        return [found] if isinstance(found, Expected) else list(found)

    def launch(self) -> Launch:
        """Return the launch without running it, for example to compile the kernel in advance."""
        with planned() as launches:
            self.outputs()
        (only,) = launches
        return only

    def error(self) -> float:
        """Run the kernel; return the largest ratio of an error to its bound. Above 1, the kernel is wrong."""
        return max(
            share(_in_numpy(found), wanted) for found, wanted in zip(self.outputs(), self.expected(), strict=True)
        )


def _in_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def share(found: np.ndarray, wanted: Expected) -> float:
    """Return the largest ratio of an error to its bound; infinity for a wrong shape or an unexpected NaN."""
    if found.shape != wanted.value.shape:
        return float("inf")
    error = np.abs(found.astype(np.float64) - wanted.value)
    error[np.isnan(wanted.value) & np.isnan(found)] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0, error / wanted.bound)
    return float("inf") if np.isnan(shares).any() else float(shares.max())


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", mean: float = 0) -> mx.array:
    """Return normally distributed numbers with this mean and standard deviation 1."""
    values = mean + rng.standard_normal(shape)
    if dtype == "bfloat16":
        return mx.array(values.astype(np.float32)).astype(mx.bfloat16)
    return mx.array(values.astype(dtype))


def cases(kernel: str | None = None) -> list[Case]:
    """Return all cases, or the cases of one kernel."""
    return [case for case in _all() if kernel in (None, case.kernel)]


def _all() -> Iterator[Case]:
    for module in (thread_per_output, simd_per_row, matvec):
        for shape in SHAPES:
            yield _rows(module, shape, _plain)
    for shape in MORE:
        yield _rows(matvec, shape, _plain)
        yield _rows(norm_project, shape, _ready(_normed))
        yield _rows(norm_qkv, shape, _ready(_qkv))
        yield _rows(norm_gate_up, shape, _ready(_gated("silu")))
    for shape in SHAPES + MORE:
        yield _rows(norm_rows, shape, _whole)
        yield _floats(*shape)
        yield _rows(project_add, shape, _added)
    for shape in SHAPES:
        yield _rows(norm_project, shape, _normed)
        yield _rows(norm_qkv, shape, _qkv)
    for i, shape in enumerate(SHAPES):
        activation = ("silu", "gelu")[i % 2]
        yield _rows(norm_gate_up, shape, _gated(activation), activation)
    for shape in MANY:
        yield _rows(tiles, shape, _plain)
    yield from _prompts()
    for heads in HEADS:
        yield _heads(*heads)
    for paged in PAGED:
        yield _paged(*paged)
    yield from (_paged(*paged, softcap=2.0) for paged in PAGED[:3])
    yield _paged(4, 2, 32, 16, 0, [300, 5], sinks=[0.5, -60.0, 8.0, 60.0])
    yield _paged(4, 2, 64, 64, 40, [90], softcap=50.0, sinks=[0.5, -60.0, 8.0, 60.0])
    for sizes in HALVES:
        yield _paged(*sizes, dtype="float16")
    yield _paged(4, 2, 64, 16, 0, [300, 5], dtype="bfloat16")
    yield _paged(4, 2, 64, 16, 40, [300, 5], dtype="q8_0")
    yield _paged(4, 2, 64, 16, -37, [300, 5])
    yield _paged(3, 1, 576, 16, 0, [300, 5], arrays=1)
    yield _paged(2, 1, 512, 64, 40, [90], dtype="q8_0")
    for i, (N, K, _, _) in enumerate(SHAPES):
        yield _dequantized(N, K, (mx.float32, mx.float16)[i % 2])
    for N, K, V, _ in SHAPES:
        yield _embedded(N, K, V)
    yield from _typed()


def _typed() -> Iterator[Case]:
    """Yield cases of types other than Q8_0: few shapes, because the kernels differ only in how they load weights."""
    for i, type_ in enumerate(TYPES):
        for shape in TYPED[:2]:
            yield _rows(matvec, shape, partial(_plain, type_=type_), type_)
        yield _dequantized(3, 512, (mx.float32, mx.float16)[i % 2], type_)
        yield _embedded(5, 768, 4, type_)
    for shape, types in zip(TYPED, MIXED, strict=True):
        q, *_, v = types
        note = " and ".join(types)
        yield _rows(norm_qkv, shape, partial(_qkv, types=types), note)
        make = _gated("silu", (q, v))
        yield _rows(norm_gate_up, shape, make, f"silu, {q} and {v}")
        normed = partial(_normed, type_=q)
        yield _rows(norm_project, shape, normed, q)
        yield _rows(project_add, shape, partial(_added, type_=v), v)
        yield _rows(tiles, shape, partial(_plain, type_=v), v)


def _prompts() -> Iterator[Case]:
    """Yield cases of the two prompt kernels: Q8_0 in all shapes of PROMPTS, each other type in one shape."""
    for module in (prompt_product, prompt_product_tensors):
        for shape in PROMPTS:
            yield _rows(module, shape, _plain)
        for i, type_ in enumerate(TYPES):
            dtype = ("float16", "bfloat16")[i % 2]
            yield _rows(module, (5, 256, 33, dtype), partial(_plain, type_=type_), type_)
        for i, of in enumerate(GROUPED):
            shape = (5, 128, 33, ("float16", "bfloat16")[i % 2])
            note = f"affine of {of[0]} bits, groups of {of[1]}"
            yield _rows(module, shape, partial(_grouped, of=of), note)


_Shape: TypeAlias = tuple[int, int, int, str]


def _rows(module: Any, shape: _Shape, make: Callable[..., Arguments], note: str = "") -> Case:
    """Return a case of the module's kernel. `make` returns the arguments; `note` is added to the label."""
    kernel, (N, K, V, dtype) = module.__name__.rpartition(".")[2], shape
    label = f"{N} x {K}, {V} x {dtype}" + (f", {note}" if note else "")
    return Case(kernel, label, getattr(module, kernel), module.reference, lambda rng: make(rng, *shape))


def _noted(type_: str) -> str:
    return "" if type_ == Q8_0 else f", {type_}"


def _plain(rng: np.random.Generator, N: int, K: int, V: int, dtype: str, type_: str = Q8_0) -> Arguments:
    # If K is a multiple of 3, x has a mean of 2, so that nearly all its elements are positive.
    return numbers(rng, (V, K), dtype, mean=2 * (K % 3 == 0)), stored(rng, N, K, type_)


def _grouped(rng: np.random.Generator, N: int, K: int, V: int, dtype: str, of: tuple[int, int]) -> Arguments:
    return numbers(rng, (V, K), dtype), affine(rng, N, K, of, getattr(mx, dtype))


def _added(rng: np.random.Generator, N: int, K: int, V: int, dtype: str, type_: str = Q8_0) -> Arguments:
    return *_plain(rng, N, K, V, dtype, type_), numbers(rng, (V, N))


def _norm(rng: np.random.Generator, K: int, V: int, dtype: str) -> Arguments:
    norm_weight = numbers(rng, (K,), ("float32", "float16")[V % 2], mean=1)
    return numbers(rng, (V, K), dtype, mean=2 * (K % 3 == 0)), norm_weight, (1e-6, 1e-2)[K % 64 == 0]


def _normed(rng: np.random.Generator, N: int, K: int, V: int, dtype: str, type_: str = Q8_0) -> Arguments:
    return *_norm(rng, K, V, dtype), stored(rng, N, K, type_)


def _qkv(
    rng: np.random.Generator, N: int, K: int, V: int, dtype: str, types: Sequence[str] = (Q8_0, Q8_0, Q8_0)
) -> Arguments:
    normed, rows = _norm(rng, K, V, dtype), (N, N // 2 + 1, N // 3 + 1)
    return *normed, *(stored(rng, n, K, type_) for n, type_ in zip(rows, types, strict=True))


def _gated(activation: str, types: Sequence[str] = (Q8_0, Q8_0)) -> Callable[..., Arguments]:
    def make(rng: np.random.Generator, N: int, K: int, V: int, dtype: str) -> Arguments:
        return *_norm(rng, K, V, dtype), *(stored(rng, N, K, type_) for type_ in types), activation

    return make


def _ready(make: Callable[..., Arguments]) -> Callable[..., Arguments]:
    """Return a function that returns the arguments from `make`, and random `factors` (an output of `norm_rows`)."""

    def ready(rng: np.random.Generator, N: int, K: int, V: int, dtype: str) -> Arguments:
        return *make(rng, N, K, V, dtype), mx.abs(numbers(rng, (V,), mean=1))

    return ready


def _whole(rng: np.random.Generator, N: int, K: int, V: int, dtype: str) -> Arguments:
    return *_norm(rng, K, V, dtype), N % 2 == 0


def _floats(N: int, K: int, V: int, _: str) -> Case:
    # Make some K no multiples of 16, because a lane loads 16 columns at a time, and must not load any beyond K.
    K -= (0, 1, 7, 12, 24)[N % 5]

    def make(rng: np.random.Generator) -> Arguments:
        return numbers(rng, (V, K), mean=2 * (K % 3 == 0)), numbers(rng, (N, K))

    return Case("dense", f"{N} x {K}, {V}", dense.dense, dense.reference, make)


def paged(
    rng: np.random.Generator, heads: tuple[int, int, int], page: int, lengths: list[int], positions: list[list[int]],
    dtype: str = "float32", arrays: int = 2,
) -> Arguments:  # fmt: skip
    """Return (q, store, pages, owner, position) for `attention`. Pages are in random order; unused slots are NaN.

    `heads` is (H, G, E). Sequence b has `lengths[b]` cached tokens, and queries at `positions[b]`. If `arrays` is 1,
    the keys are also the values.
    """
    H, G, E = heads
    held = [-(-length // page) for length in lengths]
    starts = rng.permutation(sum(held) + 2) * page
    store = np.full((arrays, G, len(starts) * page, E), np.nan, np.float32)
    pages = np.full((len(lengths), max(held) + 1), -1, np.int32)
    for b, (length, n) in enumerate(zip(lengths, held, strict=True)):
        pages[b, :n], starts = starts[:n], starts[n:]
        p = np.arange(length)
        store[:, :, pages[b, p // page] + p % page] = rng.standard_normal((arrays, G, length, E))
    owner = np.repeat(np.arange(len(lengths)), [len(of) for of in positions])
    position = np.concatenate(positions)
    queries = numbers(rng, (len(owner), H, E))
    stored = _q8_0(store) if dtype == "q8_0" else mx.array(store).astype(getattr(mx, dtype))
    return queries, stored, *map(mx.array, (pages, owner.astype(np.int32), position.astype(np.int32)))


def _q8_0(x: np.ndarray) -> mx.array:
    """Return x (..., E) as Q8_0 bytes (..., E / 32 * 34); a block of NaN gets a scale of NaN."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    quants = np.nan_to_num(np.rint(blocks / scale.astype(np.float32))).clip(-127, 127).astype(np.int8)
    return mx.array(np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=-1).reshape(*x.shape[:-1], -1))


def _paged(
    H: int, G: int, E: int, page: int, window: int, lengths: list[int], softcap: float | None = None,
    sinks: list[float] | None = None, dtype: str = "float32", arrays: int = 2,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> Arguments:
        positions = [sorted({0, n // 3, n - 1}) for n in lengths]
        return paged(rng, (H, G, E), page, lengths, positions, dtype, arrays)

    label = f"{H} heads, {G} of keys, {E} wide, pages of {page}, " + (f"window {window}, " if window else "")
    label += "" if softcap is None else f"soft cap {softcap:g}, "
    label += "" if sinks is None else "sinks, "
    label += "" if dtype == "float32" else f"{dtype}, "
    label += "" if arrays == 2 else "keys are values, "
    settings: dict[str, Any] = {"page": page, "window": window, "scale": E**-0.5, "softcap": softcap}
    settings["sinks"] = None if sinks is None else mx.array(sinks)
    call, reference = partial(attention.attention, **settings), partial(attention.reference, **settings)
    return Case("attention", label + f"{'and'.join(f' {n} ' for n in lengths).strip()} keys", call, reference, make)


def _heads(T: int, H: int, G: int, E: int, dtype: str, norms: bool) -> Case:
    def make(rng: np.random.Generator) -> Arguments:
        table = head_norm_rope.rotation_table([1e6 ** (-2 * j / E) for j in range(E // 2)], T, first=4000)
        rows = (numbers(rng, (T, n * E), dtype) for n in (H, G, G))
        norm_weights = (numbers(rng, (E,), mean=1), numbers(rng, (E,), mean=1)) if norms else None
        return *rows, mx.array(table), E, norm_weights, (1e-6, 1e-5)

    label = f"{T} tokens, {H} + {G} heads of {E} {dtype}, {'normed' if norms else 'no norms'}"
    return Case("head_norm_rope", label, head_norm_rope.head_norm_rope, head_norm_rope.reference, make)


def _dequantized(N: int, K: int, dtype: mx.Dtype, type_: str = Q8_0) -> Case:
    label = f"{N} x {K} to {word(dtype)}" + _noted(type_)
    call, reference = dequantize.dequantize, dequantize.reference
    return Case("dequantize", label, call, reference, lambda rng: (stored(rng, N, K, type_), dtype))


def _embedded(N: int, K: int, T: int, type_: str = Q8_0) -> Case:
    def make(rng: np.random.Generator) -> Arguments:
        # Some ids are below or above the valid range; their rows must be NaN.
        return stored(rng, N, K, type_), mx.array(rng.integers(-1, N + 1, T).astype(np.int32))

    return Case("embed_rows", f"{T} of {N} x {K}" + _noted(type_), embed_rows.embed_rows, embed_rows.reference, make)
