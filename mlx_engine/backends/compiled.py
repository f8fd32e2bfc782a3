"""`simd` and `parallel` with compiled kernels: whole blocks in one call, weights as they are stored.

The only difference between the two is the number of threads, and no bit of a result depends on that.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mlx_engine.backends.kernels import Kernels
from mlx_engine.backends.matrices import Group, Matrix
from mlx_engine.backends.parameters import Activation, Array, Linear, Norm, RMSNorm, Rope, Visible
from mlx_engine.backends.simd import SimdBackend, rope_table
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

_NOTHING = np.empty(0, dtype=np.float32)
_NO_ROWS = np.empty((0, 0), dtype=np.float32)


class CompiledBackend(SimdBackend):
    """Operations are called inside a `session`, which one thread at a time can hold: they share a pool's memory."""

    def __init__(self, kernels: Kernels, name: str, threads: int) -> None:
        super().__init__()
        self.name, self.threads = name, threads
        self.kernels, self.pool = kernels, kernels.pool.Pool(threads)
        self._turn = threading.RLock()
        self._mapped: list[np.ndarray] = []
        self._groups: dict[tuple[int, ...], Group] = {}
        self._tables: dict[Rope, tuple[np.ndarray, np.ndarray]] = {}

        self._warm_up()

    def _warm_up(self) -> None:
        """Run everything once on next to nothing, so that no pass has to load code: one token, then many."""
        ones = Weight.pack("ones", np.ones((32, 32), dtype=np.float32), Q8_0)
        layer, norm = Linear("", self.prepare(ones)), RMSNorm("", np.ones(32, dtype=np.float32), 1e-6)
        rope, head_dim = Rope.plain(32, 1e4), 32
        for n in (1, self.kernels.linear.FEW + 1):
            x = self.embed(layer.weight, [0] * n)
            q, k, v = self.norm_project(x, norm, (layer, layer, layer))
            q, k, v = self.head_norm_rope(q, k, v, head_dim, (norm, norm), rope, 0)
            store = self.kv_write(self.kv_empty(1, head_dim, n), 0, k, v)
            self.attention(q, Visible(store, 0, n), 1.0)
            self.norm_gate_up(self.project_add(x, layer, x), norm, layer, layer, "silu")
        self._groups.clear()
        self._tables.clear()
        self._mapped.clear()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The pool's turn, and what NumPy needs."""
        with self._turn, super().session():
            yield

    def prepare(self, weight: Weight) -> Array:
        """A Q8_0 matrix stays as it is stored, a view of the mapped file; anything else is expanded, once."""
        if len(weight.shape) != 2:
            return np.array(weight.dequantize(), dtype=np.float32)
        shape = (weight.shape[0], weight.shape[1])
        if weight.type == Q8_0:
            self._mapped.append(weight.data)
            return Matrix(shape, self.kernels.formats.Q8_0, weight.data)
        return Matrix(shape, self.kernels.formats.F32, np.ascontiguousarray(weight.dequantize(), dtype=np.float32))

    def read_ahead(self) -> None:
        """Touch every page of the weights, on a thread that nobody waits for: the first pass would do it one by one."""
        mapped, self._mapped = self._mapped, []

        def touch() -> None:
            for data in mapped:
                data[:: mmap.PAGESIZE].max()

        threading.Thread(target=touch, name="mlx_engine-read-ahead", daemon=True).start()

    def embed(self, table: Array, ids: Sequence[int]) -> Array:
        """Rows of the table, these alone expanded."""
        rows = np.asarray(ids, dtype=np.int64)
        if table.kind == self.kernels.formats.F32:
            return table.data[rows]
        chosen = np.ascontiguousarray(table.data.reshape(table.shape[0], -1)[rows]).reshape(-1)
        expanded = np.empty((len(rows), table.shape[1]), dtype=np.float32)
        self.kernels.q8_0.dequantize(chosen, 0, expanded.size // 32, expanded.reshape(-1), 0)
        return expanded

    def linear(self, x: Array, linear: Linear) -> Array:
        """Products with the stored rows."""
        return self._project(x, None, (linear,))

    def norm_project(self, x: Array, norm: Norm, projections: Sequence[Linear]) -> list[Array]:
        """The norm and all products in one job."""
        if not isinstance(norm, RMSNorm) or len(projections) > self.kernels.linear.MOST_MATRICES:
            return super().norm_project(x, norm, projections)
        linears = tuple(projections)
        y = self._project(x, norm, linears)
        return [y[:, columns] for columns in self._group(linears, gated=False).columns]

    def project_add(self, x: Array, projection: Linear, residual: Array) -> Array:
        """The sum is taken where the products are."""
        return self._project(x, None, (projection,), residual=residual)

    def norm_gate_up(self, x: Array, norm: Norm, gate: Linear, up: Linear, activation: Activation) -> Array:
        """Every row of the gate is multiplied next to the row above it."""
        simple = isinstance(norm, RMSNorm) and gate.bias is None and up.bias is None
        if not simple:
            return super().norm_gate_up(x, norm, gate, up, activation)
        kind = self.kernels.activations.SILU if activation == "silu" else self.kernels.activations.GELU
        return self._project(x, norm, (gate, up), activation=kind)

    def norm_head(self, x: Array, norm: Norm, head: Linear, *, every: bool) -> Array:
        """The norm and the products in one job."""
        if not isinstance(norm, RMSNorm):
            return super().norm_head(x, norm, head, every=every)
        return self._project(x if every else self.last(x), norm, (head,))

    def _project(
        self,
        x: np.ndarray,
        norm: Norm | None,
        linears: tuple[Linear, ...],
        *,
        residual: np.ndarray = _NO_ROWS,
        activation: int = 0,
    ) -> np.ndarray:
        group, k = self._group(linears, gated=activation != 0), self.kernels
        y = np.empty((len(x), group.n_columns), dtype=np.float32)
        gain, eps = (norm.gain, norm.eps) if isinstance(norm, RMSNorm) else (_NOTHING, 0.0)
        few, many = (k.few_gated, k.many_gated) if activation else (k.few, k.many)
        self._awake()
        k.linear.project(
            self.pool.control, few, many, k.pack, _rows(x), gain, eps, group.table, group.rows, _rows(residual),
            activation, y,
        )  # fmt: skip
        return y

    def _group(self, linears: tuple[Linear, ...], *, gated: bool) -> Group:
        key = (gated, *map(id, linears))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(linears, self.kernels.linear, gated=gated)
        return group

    def _awake(self) -> None:
        if self.pool.shared.asleep:
            self.pool.shared.wake()

    def head_norm_rope(
        self,
        q: Array,
        k: Array,
        v: Array,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rope: Rope,
        offset: int,
    ) -> tuple[Array, Array, Array]:
        """Norm and rotation in one pass over the heads."""
        cos, sin = self._table(rope, offset + len(q))
        (q_gain, q_eps), (k_gain, k_eps) = [(n.gain, n.eps) for n in norms] if norms else [(_NOTHING, 0.0)] * 2
        q_out = np.empty((len(q), q.shape[1] // head_dim, head_dim), dtype=np.float32)
        k_out = np.empty((len(k), k.shape[1] // head_dim, head_dim), dtype=np.float32)
        self._awake()
        self.kernels.heads.norm_rope_pair(
            self.pool.control, self.kernels.norm_rope, _in_rows(q), _in_rows(k), q_gain, k_gain, q_eps, k_eps, cos, sin,
            offset, q_out, k_out,
        )  # fmt: skip
        return q_out, k_out, v.reshape(len(v), -1, head_dim)

    def _table(self, rope: Rope, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of at least `length` positions; twice as many each time that they do not suffice."""
        found = self._tables.get(rope)
        if found is None or len(found[0]) < length:
            found = self._tables[rope] = rope_table(rope, 0, max(512, 1 << (length - 1).bit_length()))
        return found

    def attention(self, q: Array, seen: Visible, scale: float) -> Array:
        """Keys and values are read where they lie."""
        if q.shape[2] % self.kernels.LANES:
            return super().attention(q, seen, scale)
        out = np.empty(q.shape, dtype=np.float32)
        self._awake()
        self.kernels.attention.attend(
            self.pool.control, self.kernels.attend_one, self.kernels.attend_many, np.ascontiguousarray(q), seen.store,
            seen.start, seen.stop, seen.window or 0, scale, out,
        )  # fmt: skip
        return out


def _in_rows(x: np.ndarray) -> np.ndarray:
    """Rows may be apart, as the columns of a larger array are; their elements may not."""
    return x if x.strides[1] == x.itemsize and x.strides[0] >= 0 else np.ascontiguousarray(x)


def _rows(x: np.ndarray) -> np.ndarray:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)
