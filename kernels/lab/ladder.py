"""Measure kernels on the matrix sizes of a model, for `kernels bench`.

The *ladder* is a list of kernels for the same product with a Q8_0 matrix, from slow to fast. Kernels that take a
`Tuning` (rows per lane, SIMD-groups per threadgroup) are measured with every tuning, and MLX's own product is measured
for comparison. `climb` measures the ladder. `climb_prompts` measures the two kernels for products with prompts.
`climb_attention` measures the attention of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..launch import ExecutorName, Launch, planned
from ..metal.attention import attention, fits
from ..metal.cases import affine, matrix, numbers, paged, stored
from ..metal.formats import Q8_0Matrix
from ..metal.layout import AffineMatrix, word
from ..metal.matvec import matvec
from ..metal.norm_gate_up import norm_gate_up
from ..metal.norm_project import norm_project
from ..metal.norm_qkv import norm_qkv
from ..metal.project_add import project_add
from ..metal.prompt_product import prompt_product
from ..metal.prompt_product_tensors import prompt_product_tensors
from ..metal.rows import MOST_VECTORS, TUNINGS, Tuning
from ..metal.simd_per_row import simd_per_row
from ..metal.thread_per_output import thread_per_output
from ..metal.tiles import tiles
from .bench import cold_inputs, mlx_product, nbytes, seconds_per_call, seconds_per_launch
from .run import counted

Row = dict[str, Any]
Call = Callable[..., Any]

STOCK = "mx.quantized_matmul"
EPS = 1e-6


@dataclass(frozen=True)
class Product:
    """One product of a decode step: matrices (rows[i], columns) that are multiplied with the same input."""

    title: str  # such as "q+k+v"
    rows: tuple[int, ...]
    columns: int


def products(
    *, hidden_size: int, intermediate_size: int, n_heads: int, n_kv_heads: int, head_dim: int, vocab_size: int
) -> list[Product]:
    """Return the products of one layer and of the head (the output matrix)."""
    queries, keys = n_heads * head_dim, n_kv_heads * head_dim
    return [
        Product("q+k+v", (queries, keys, keys), hidden_size),
        Product("o", (hidden_size,), queries),
        Product("gate+up", (intermediate_size, intermediate_size), hidden_size),
        Product("down", (hidden_size,), intermediate_size),
        Product("head", (vocab_size,), hidden_size),
    ]


def climb(
    every: Sequence[Product], executor: ExecutorName, vectors: int = 1, tunings: Sequence[Tuning] = TUNINGS
) -> Iterator[Row]:
    """Yield one result per product and kernel: on a GPU, the measured time; in the emulator, operation counts.

    Fused kernels get the matrices of a product separately; other kernels and MLX get them joined into one matrix.
    """
    for product in every:
        rng = np.random.default_rng(0)
        x = numbers(rng, (vectors, product.columns))
        matrices = [matrix(rng, n, product.columns) for n in product.rows]
        whole = _joined(matrices)
        common = {"product": product.title, "rows": product.rows, "columns": product.columns, "vectors": vectors}
        untuned = (thread_per_output, simd_per_row) + ((tiles,) if vectors > MOST_VECTORS else ())
        for call in untuned:
            yield common | _measured([_planned(partial(call, x, whole))], executor)
        for call in (partial(matvec, x, whole), _fused(product, x, matrices, rng)):
            yield common | _measured(_tuned(call, tunings), executor)
        if executor != "emulator":
            yield common | _stock(x, whole)


# Tokens of a prompt: PROMPT on a GPU, COUNTED in the emulator, where more tokens would take minutes.
PROMPT, COUNTED = 512, 64
ATTENTION = "mx.fast.scaled_dot_product_attention"
# Maps each type of weights to (bits, group size). `climb_prompts` measures these types in MLX's arrays.
GROUPED = {"Q8_0 in MLX's arrays": (8, 32), "affine, 4 bits, groups of 64": (4, 64)}
DTYPES = (mx.float16, mx.bfloat16)


def climb_prompts(every: Sequence[Product], executor: ExecutorName) -> Iterator[Row]:
    """Multiply a prompt: yield one result per product of a layer, type of weights, type of activations and kernel.

    On a GPU, a result has the time and the operations per second, or the error if the GPU refuses the kernel: for
    example, older versions of macOS have no `matmul2d`. In the emulator, a result has operation counts, and only one
    type of weights and one type of activations run. The head is left out, because a prompt needs only one row of
    logits.
    """
    emulated = executor == "emulator"
    vectors = COUNTED if emulated else PROMPT
    types = [*GROUPED, "Q6_K"]
    for product in (one for one in every if one.title != "head"):
        n, k = sum(product.rows), product.columns
        for type_, dtype in (
            (a, b) for a in types[: 1 if emulated else None] for b in DTYPES[: 1 if emulated else None]
        ):
            if type_ == "Q6_K" and k % 256:
                continue
            rng = np.random.default_rng(0)
            x = numbers(rng, (vectors, k)).astype(dtype)
            weight = affine(rng, n, k, GROUPED[type_], dtype) if type_ in GROUPED else stored(rng, n, k, type_)
            common = {"product": product.title, "rows": product.rows, "columns": k, "vectors": vectors}
            common |= {"type": type_, "activations": word(dtype)}
            rows = [_tried(partial(call, x, weight), executor) for call in (prompt_product, prompt_product_tensors)]
            if not emulated and isinstance(weight, AffineMatrix):
                rows.append(_stock_prompt(x, weight))
            for row in rows:
                yield common | row | ({"tflops": 2e-12 * n * k * vectors / row["seconds"]} if "seconds" in row else {})


def climb_attention(*, n_heads: int, n_kv_heads: int, head_dim: int, executor: ExecutorName) -> Iterator[Row]:
    """Measure the attention of a prompt: yield MLX's time for each type of activations, and our kernel's for float32.

    In the emulator, yield nothing.
    """
    if executor == "emulator":
        return
    rng, T = np.random.default_rng(0), PROMPT
    shape = {"heads": (n_heads, n_kv_heads), "head_dim": head_dim, "vectors": T}
    for dtype in (*DTYPES, mx.float32):
        q, k, v = (numbers(rng, (1, n, T, head_dim)).astype(dtype) for n in (n_heads, n_kv_heads, n_kv_heads))
        mx.eval(q, k, v)
        call = partial(mx.fast.scaled_dot_product_attention, q, k, v, scale=head_dim**-0.5, mask="causal")
        yield shape | {"kernel": ATTENTION, "activations": word(dtype), "seconds": seconds_per_call([call] * 8)}
    if fits(head_dim):
        given = paged(rng, (n_heads, n_kv_heads, head_dim), T, [T], [list(range(T))])
        call = partial(attention, *given, page=T, window=0, scale=head_dim**-0.5)
        yield shape | {"kernel": "attention", "activations": "float32", "seconds": seconds_per_call([call] * 8)}


def _tried(call: Call, executor: ExecutorName) -> Row:
    launch = _planned(call)
    try:
        return _measured([launch], executor)
    except (RuntimeError, ValueError) as error:
        if executor == "emulator":
            raise
        return {"kernel": launch.kernel.name, "nbytes": nbytes(launch), "refused": str(error).strip().splitlines()[0]}


def _stock_prompt(x: mx.array, weight: AffineMatrix) -> Row:
    def product_of(x: mx.array, wq: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, wq, scales, biases, group_size=weight.group, bits=weight.bits)

    inputs = cold_inputs([x, weight.wq, weight.scales, weight.biases])
    needed = weight.nbytes + x.nbytes + x.dtype.size * len(x) * weight.shape[0]
    seconds = seconds_per_call([partial(product_of, *one) for one in inputs])
    return {"kernel": STOCK, "nbytes": needed, "seconds": seconds, "gbs": needed / seconds / 1e9}


def _fused(product: Product, x: mx.array, matrices: list[Q8_0Matrix], rng: np.random.Generator) -> Call:
    """Return the call that the `metal` backend makes for this product."""
    norm_weight = numbers(rng, (product.columns,), mean=1)
    # With more than MOST_VECTORS vectors, the backend computes the factors of the norm in a separate launch, which is
    # not measured here.
    factors = mx.ones(len(x)) if len(x) > MOST_VECTORS else None
    if product.title == "q+k+v":
        q, k, v = matrices
        return partial(norm_qkv, x, norm_weight, EPS, q, k, v, factors)
    if product.title == "gate+up":
        gate, up = matrices
        return partial(norm_gate_up, x, norm_weight, EPS, gate, up, "silu", factors)
    if product.title == "head":
        return partial(norm_project, x, norm_weight, EPS, matrices[0], factors)
    return partial(project_add, x, matrices[0], numbers(rng, (len(x), product.rows[0])))


def _joined(matrices: list[Q8_0Matrix]) -> Q8_0Matrix:
    if len(matrices) == 1:
        return matrices[0]
    whole = Q8_0Matrix(mx.concatenate([m.wq for m in matrices]), mx.concatenate([m.ws for m in matrices]))
    mx.eval(whole.wq, whole.ws)
    return whole


def _planned(call: Call) -> Launch:
    with planned() as launches:
        call()
    (launch,) = launches
    return launch


def _tuned(call: Call, tunings: Sequence[Tuning]) -> list[Launch]:
    """Return a launch per tuning. Skip tunings that put SIMD-groups that share a row into several threadgroups."""
    launches = []
    for tuning in tunings:
        try:
            launches.append(_planned(partial(call, tuning=tuning)))
        except ValueError:
            continue
    return launches


def _measured(launches: list[Launch], executor: ExecutorName) -> Row:
    """Return the parameters and the time of the fastest launch; under "tried", those of every launch, if several.

    In the emulator, return the parameters and the operation counts of the first launch.
    """
    row: Row = {"kernel": launches[0].kernel.name, "nbytes": nbytes(launches[0])}
    if executor == "emulator":
        return row | _parameters(launches[0]) | {"counts": counted(launches[0])}
    sets = cold_inputs(launches[0].inputs)
    tried = [_parameters(launch) | {"seconds": seconds_per_launch(launch, sets, executor)} for launch in launches]
    best = min(tried, key=lambda one: one["seconds"])
    return row | best | {"gbs": row["nbytes"] / best["seconds"] / 1e9} | ({"tried": tried} if len(tried) > 1 else {})


def _parameters(launch: Launch) -> Row:
    """Return the kernel's parameters among R (rows per lane), NSG (SIMD-groups per threadgroup) and KS (per row)."""
    template = dict(launch.template)
    return {name: template[name] for name in ("R", "NSG", "KS") if name in template}


def _stock(x: mx.array, weight: Q8_0Matrix) -> Row:
    """Return the time and the rate of MLX's product with the same weights.

    With float32 scales and biases, MLX reads 40 bytes per 32 weights. The rate counts only the 34 bytes of Q8_0, as for
    our kernels, so that equal rates mean equal times.
    """
    scales = weight.ws.astype(mx.float32)
    biases = -128 * scales
    mx.eval(scales, biases)
    calls = [partial(mlx_product, *inputs) for inputs in cold_inputs([x, weight.wq, scales, biases])]
    needed = weight.nbytes + x.nbytes + 4 * len(x) * weight.shape[0]
    seconds = seconds_per_call(calls)
    return {"kernel": STOCK, "nbytes": needed, "seconds": seconds, "gbs": needed / seconds / 1e9}
