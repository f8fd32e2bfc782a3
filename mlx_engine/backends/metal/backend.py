"""The backends `metal` and `cuda` for float32 activations: the `mlx` backend with our own GPU kernels.

Both backends run the same kernel source, and compute in float32. With float16 or bfloat16 activations, other classes
are used: `RoundedMetalBackend` for `metal`, and `MlxBackend` for `cuda`.

For up to eight tokens, a layer takes seven kernel launches: norm with q, k and v; norm and rotation of heads; write of
keys and values; attention; output projection with residual; norm with gate, up and activation; down projection with
residual. For more tokens, the norm before q, k and v and the norm before gate and up are separate launches.

Each row of an operation's result has the same bits for any number of rows in the pass, and at any index in the pass,
for these reasons:

- Our kernels for products and for norms of whole rows have one order of summation over the columns
  (`kernels/metal/products.h.metal`).
- Attention sums over keys in blocks counted from position 0 (`kernels/metal/attention.py`).
- MLX multiplies the matrices of experts with one row at a time.
- MLX processes recurrent states one token at a time.
- All other MLX operations work on one element or one row: biases, layer norms, norms of heads, activations without a
  gate, routing.

There are three exceptions, in which MLX operations replace a kernel and a row's bits may depend on the other rows: a
head dim that the attention kernel does not support; float matrices of fewer than 8 columns; and a kernel that the GPU
has refused, which is logged as a warning. Even then, the relative error of logits is at most 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import mlx.core as mx
import numpy as np

from mlx_engine.backends.batch import KVView
from mlx_engine.backends.experts import ExpertLinear
from mlx_engine.backends.metal.kernels import Kernels
from mlx_engine.backends.metal.tuning import tuner
from mlx_engine.backends.metal.weights import Half, SplitMatrix, affine, joined, split
from mlx_engine.backends.mlx import experts as mlx_experts
from mlx_engine.backends.mlx.backend import MlxBackend, indices, stored_rows
from mlx_engine.backends.numpy.simd import rope_table
from mlx_engine.backends.parameters import Activation, HeadNorms, Linear, Native, Norm, RMSNorm, Rope, Scores
from mlx_engine.kernels.launch import ExecutorName, use
from mlx_engine.kernels.metal.attention import fits
from mlx_engine.kernels.metal.dense import NARROWEST
from mlx_engine.kernels.metal.layout import BLOCK
from mlx_engine.quant.weight import Weight

# The smallest head dim that the kernel `head_norm_rope` supports.
NARROWEST_HEAD = 8

# The activations that the kernel `norm_gate_up` supports.
_FUSED: dict[Activation, Literal["silu", "gelu"]] = {"silu": "silu", "gelu": "gelu"}

# The number of `Places` (page tables and positions for the attention kernel) that are kept, so that later layers of the
# pass reuse them: one for layers with a window, one for layers without a window, and one for the last layer, which
# computes fewer rows.
KEPT_PLACES = 3


class ExecutorBackend(MlxBackend):
    """The `mlx` backend on the device of an executor. An executor (metal, cuda or emulator) runs our kernels."""

    def __init__(self, activations: str, executor: ExecutorName) -> None:
        self.executor = executor
        super().__init__(activations, "cuda" if executor == "cuda" else "metal")
        if executor == "emulator":
            self.device = "emulated on cpu"
            self._real = mx.float64
            self._use(mx.Device(mx.cpu))

    @contextmanager
    def session(self) -> Iterator[None]:
        with super().session(), use(self.executor):
            yield


class MetalBackend(ExecutorBackend):
    """The `mlx` backend with our kernels.

    The operation `head_norm_rope` returns queries as a transposed view of an array (H, T, E). It returns new keys and
    values as two `Half` objects, which share one array.
    """

    fixes_bits = True
    # `state_space` processes one token at a time, so that results do not depend on how passes divide a sequence.
    space_tokens = 1

    def __init__(self, executor: ExecutorName) -> None:
        super().__init__("f32", executor)
        self.kernels = Kernels(executor, tuner(executor))
        self._rope_tables: dict[Rope, mx.array] = {}
        self._places: list[Places] = []

    def prepare(self, weight: Weight) -> Native:
        """Keep weights in their stored type if kernels multiply this type; dequantise all other weights."""
        matrix = split(weight, self.kernels)
        return mx.array(weight.dequantize()) if matrix is None else matrix

    def stack(self, linears: Sequence[Linear]) -> Native:
        """Convert the experts' matrices to MLX's affine format if it can express them exactly, else to floats."""
        return mlx_experts.stacked([replace(linear, weight=affine(linear.weight)) for linear in linears])

    def expert_linear(self, x: Native, linear: ExpertLinear, ids: Native) -> Native:
        return mlx_experts.multiply(x, linear.weights, ids, row_by_row=True)

    def warm_up(self, run: Callable[[], Native]) -> None:
        with self.session():
            self.wait(run())

    def host(self, x: Native) -> np.ndarray:
        return super().host(_whole(x))

    def wait(self, x: Native) -> None:
        super().wait(_whole(x))

    def linear(self, x: Native, linear: Linear) -> Native:
        """Multiply float32 matrices with the kernel `dense`, which sums in the same order for any number of rows."""
        if isinstance(linear.weight, SplitMatrix) or linear.weight.shape[1] < NARROWEST:
            return super().linear(x, linear)
        y = self.kernels.dense(x, linear.weight)
        if y is None:
            return super().linear(x, linear)
        return y if linear.bias is None else y + linear.bias

    def rms_norm(self, x: Native, weight: Native, eps: float) -> Native:
        """Norm rows (T, D) with a kernel that sums in the same order as the fused kernels.

        MLX norms heads, whose arrays have three axes. MLX also norms rows whose width is not a multiple of `BLOCK`. The
        fused kernels never norm such rows, because no quantised matrix has inputs of such a width.
        """
        y = self.kernels.rms_norm(x, weight, eps) if x.ndim == 2 and x.shape[1] % BLOCK == 0 else None
        return super().rms_norm(x, weight, eps) if y is None else y

    def norm_project(self, x: Native, norm: Norm | None, projections: Sequence[Linear]) -> list[Native]:
        """If there are three projections (q, k and v), run one kernel with the norm and all projections.

        Otherwise, or if the GPU has refused this kernel, run one kernel per projection, each with the norm.
        """
        if isinstance(norm, RMSNorm) and (weights := _split(projections)):
            if len(weights) == 3:
                products = self.kernels.norm_qkv(x, norm, *weights)
                if products is not None:
                    return list(products)
            ys = [self.kernels.norm_project(x, norm, weight) for weight in weights]
            if all(y is not None for y in ys):
                return ys
        return super().norm_project(x, norm, projections)

    def head_norm_rope(
        self, q: Native, k: Native, v: Native, head_dim: int, norms: HeadNorms, rope: Rope, positions: Sequence[int]
    ) -> tuple[Native, Native, Native]:
        if head_dim >= NARROWEST_HEAD and rope.growth is None:  # the kernel reads one table for queries and keys
            cos_sin = self._table(rope, max(positions) + 1)[indices(np.asarray(positions))]
            made = self.kernels.head_norm_rope(q, k, v, cos_sin, head_dim, norms)
            if made is not None:
                rotated, both = made
                return rotated.transpose(1, 0, 2), Half(both, 0), Half(both, 1)
        return super().head_norm_rope(q, k, v, head_dim, norms, rope, positions)

    def _table(self, rope: Rope, length: int) -> mx.array:
        """Return the cos/sin table (L, E/2, 2) of the first L >= `length` positions."""
        found = self._rope_tables.get(rope)
        if found is None or len(found) < length:
            table = rope_table(rope, range(max(512, 1 << (length - 1).bit_length())))
            found = self._rope_tables[rope] = mx.array(np.stack(table, axis=-1)[:, 0])
        return found

    def project_add(self, x: Native, projection: Linear, residual: Native) -> Native:
        weights = _split((projection,))
        y = self.kernels.project_add(x, weights[0], residual) if weights else None
        return super().project_add(x, projection, residual) if y is None else y

    def norm_gate_up(self, x: Native, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Native:
        y, fused = None, _FUSED.get(activation)
        if fused and isinstance(norm, RMSNorm) and (weights := _split((gate, up))):
            y = self.kernels.norm_gate_up(x, norm, weights[0], weights[1], fused)
        return super().norm_gate_up(x, norm, gate, up, activation) if y is None else y

    def norm_head(self, x: Native, norm: Norm, head: Linear) -> Native:
        y = None
        if isinstance(norm, RMSNorm) and (weights := _split((head,))):
            y = self.kernels.norm_project(x, norm, weights[0])
        return super().norm_head(x, norm, head) if y is None else y

    def attention(self, q: Native, kv: KVView, counts: Sequence[int], scores: Scores) -> Native:
        y = None
        if fits(q.shape[2]):
            of = self._places_of(kv, counts)
            y = self.kernels.attention(q, kv.store, of.pages, of.owner, of.position, kv.page, kv.window or 0, scores)
        return super().attention(q, kv, counts, scores) if y is None else y

    def _places_of(self, kv: KVView, counts: Sequence[int]) -> Places:
        found = next((places for places in self._places if places.are_of(kv, counts)), None)
        if found is None:
            found = Places(kv, counts)
            self._places = [found, *self._places[: KEPT_PLACES - 1]]
        return found

    def kv_write(self, store: Native, slots: np.ndarray, k: Native, v: Native) -> Native:
        both = joined(k, v) if len(store) == 2 else None
        if both is None:
            return super().kv_write(store, slots, _whole(k), _whole(v))
        store[:, :, indices(slots)] = stored_rows(both, self.kv_type)
        return store


class Places:
    """The page tables, and each query's sequence and position, as int32 MLX arrays for the kernel `attention`."""

    def __init__(self, kv: KVView, counts: Sequence[int]) -> None:
        self._spans, self._counts = kv.spans, tuple(counts)
        n_pages = [-(-span.length // kv.page) for span in kv.spans]
        table = np.zeros((len(n_pages), max(n_pages)), dtype=np.int32)
        for row, span, n in zip(table, kv.spans, n_pages, strict=True):
            row[:n] = span.pages[:n]
        places = [(b, p) for b, n in enumerate(counts) for p in range(kv.spans[b].length - n, kv.spans[b].length)]
        self.pages = mx.array(table)
        self.owner, self.position = (mx.array(np.array(column, dtype=np.int32)) for column in zip(*places, strict=True))

    def are_of(self, kv: KVView, counts: Sequence[int]) -> bool:
        return self._spans is kv.spans and self._counts == tuple(counts)


def _whole(x: Native) -> Native:
    """Return x, but convert a `Half` to an `mx.array`. If x is a tuple or list, do this for each element."""
    if isinstance(x, tuple | list):
        return [_whole(part) for part in x]
    return x.array() if isinstance(x, Half) else x


def _split(linears: Sequence[Linear]) -> list[SplitMatrix]:
    """Return the matrices of linear layers for a fused kernel.

    Return [] if any layer has a bias, or a matrix that is not a `SplitMatrix`.
    """
    are_split = all(isinstance(linear.weight, SplitMatrix) and linear.bias is None for linear in linears)
    return [linear.weight for linear in linears] if are_split else []
