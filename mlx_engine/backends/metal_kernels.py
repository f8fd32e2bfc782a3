"""Our kernels as the backend calls them: each tried before it is used, and launched at the sizes that suit the GPU.

A GPU's compiler may refuse a kernel, and because MLX is lazy that would show when somebody looks at a result. So every
instantiation first runs once on zeros. What was refused is answered with None from then on: the caller has a twin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import mlx.core as mx

from kernels.launch import ExecutorName
from kernels.metal.attention import attention
from kernels.metal.dense import dense
from kernels.metal.embed_rows import embed_rows
from kernels.metal.head_norm_rope import head_norm_rope
from kernels.metal.layout import Q8_0Matrix
from kernels.metal.matvec import matvec
from kernels.metal.norm_gate_up import norm_gate_up
from kernels.metal.norm_project import norm_project
from kernels.metal.norm_qkv import norm_qkv
from kernels.metal.norm_rows import norm_rows
from kernels.metal.project_add import project_add
from kernels.metal.rows import MOST_VECTORS, Tuning
from mlx_engine.backends.metal_tuning import Tuner
from mlx_engine.backends.metal_weights import SplitMatrix
from mlx_engine.backends.parameters import Activation, RMSNorm
from mlx_engine.observe.log import LOGGER

T = TypeVar("T")

TUNED: tuple[Callable[..., Any], ...] = (norm_qkv, norm_project, norm_gate_up, project_add, matvec)


class Kernels:
    """The kernels of one executor. Whatever one returns, it may return None instead: it has been refused.

    Attributes:
        refused: why, by the kernel's name.
    """

    def __init__(self, executor: ExecutorName, tuner: Tuner | None = None) -> None:
        self.refused: dict[str, str] = {}
        self._refusals = _refusals(executor)
        self._tuner = tuner
        self._tried: dict[Hashable, Tuning | None] = {}

    def norm_qkv(
        self, x: mx.array, norm: RMSNorm, q: SplitMatrix, k: SplitMatrix, v: SplitMatrix
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        """Three products of the normed x."""
        return self._normed(norm_qkv, (q.shape, k.shape, v.shape), x, norm, q.matrix, k.matrix, v.matrix)

    def norm_project(self, x: mx.array, norm: RMSNorm, weight: SplitMatrix) -> mx.array | None:
        """One product of the normed x."""
        return self._normed(norm_project, weight.shape, x, norm, weight.matrix)

    def norm_gate_up(
        self, x: mx.array, norm: RMSNorm, gate: SplitMatrix, up: SplitMatrix, activation: Activation
    ) -> mx.array | None:
        """The first half of a gated feed-forward network."""
        key = gate.shape, up.shape, activation
        return self._normed(norm_gate_up, key, x, norm, gate.matrix, up.matrix, activation)

    def project_add(self, x: mx.array, weight: SplitMatrix, residual: mx.array) -> mx.array | None:
        """A product added to the residual stream."""
        return self._run(project_add, (tile(x), weight.shape), x, weight.matrix, residual)

    def multiply(self, x: mx.array, weight: SplitMatrix) -> mx.array | None:
        """A product."""
        return self._run(matvec, (tile(x), weight.shape), x, weight.matrix)

    def dense(self, x: mx.array, weight: mx.array) -> mx.array | None:
        """A product with a float32 matrix."""
        return self._run(dense, (tile(x), weight.shape), x, weight)

    def rms_norm(self, x: mx.array, gain: mx.array, eps: float) -> mx.array | None:
        """Rows (V, K) normed, K a multiple of 32."""
        made = self._run(norm_rows, x.shape[1:], x, gain, eps, True)
        return None if made is None else made[0]

    def rows(self, table: SplitMatrix, ids: mx.array) -> mx.array | None:
        """Rows of a table by their ids, uint32."""
        return self._run(embed_rows, (len(ids) < 8, table.shape), table.matrix, ids.view(mx.int32))

    def head_norm_rope(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        turns: mx.array,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> tuple[mx.array, mx.array] | None:
        """Queries (H, T, E), and keys and values (2, K, T, E)."""
        gains = (norms[0].gain, norms[1].gain) if norms else None
        eps = (norms[0].eps, norms[1].eps) if norms else (0.0, 0.0)
        key = q.shape[1], k.shape[1], head_dim, norms is None
        return self._run(head_norm_rope, key, q, k, v, turns, head_dim, gains, eps)

    def attention(
        self,
        q: mx.array,
        store: mx.array,
        pages: mx.array,
        owner: mx.array,
        position: mx.array,
        page: int,
        window: int,
        scale: float,
    ) -> mx.array | None:
        """Attention (R, H, E) of rows to the keys and values of their pages."""
        key = q.shape[1:], store.shape[1], page, window, len(q) < 8, pages.size < 8
        # It is tried on a store of one slot: another pool of keys and values might not fit into memory.
        idle = q, store[:, :, :1], pages, owner, position
        settings = {"page": page, "window": window, "scale": scale}
        return self._run(attention, key, q, store, pages, owner, position, idle=idle, **settings)

    def _normed(self, kernel: Callable[..., T], key: Hashable, x: mx.array, norm: RMSNorm, *rest: Any) -> T | None:
        """Run a kernel that norms a few vectors; of many, `norm_rows` makes what it reads."""
        if len(x) <= MOST_VECTORS:
            return self._run(kernel, (len(x), key), x, norm.gain, norm.eps, *rest)
        made = None if kernel.__name__ in self.refused else self._run(norm_rows, x.shape[1:], x, norm.gain, norm.eps)
        if made is None:
            return None
        rows, factors = made
        return self._run(kernel, (tile(x), key), rows, norm.gain, norm.eps, *rest, factors)

    def _run(
        self, kernel: Callable[..., T], key: Hashable, *args: Any, idle: tuple[Any, ...] = (), **settings: Any
    ) -> T | None:
        """Run a kernel; an instantiation that is new is tried on zeros like `idle`, or else like the arguments."""
        name = kernel.__name__
        if name in self.refused:
            return None
        instance = name, key
        if instance not in self._tried and not self._try(kernel, instance, idle or args, settings):
            return None
        tuning = self._tried[instance]
        return kernel(*args, **settings) if tuning is None else kernel(*args, tuning=tuning, **settings)

    def _try(
        self,
        kernel: Callable[..., Any],
        instance: tuple[str, Hashable],
        args: tuple[Any, ...],
        settings: dict[str, Any],
    ) -> bool:
        """Whether the GPU takes this instantiation, and at which sizes it is launched. Said once if it does not."""
        name, idle = instance[0], tuple(map(zeros, args))
        try:
            tuning = self._tuner.choose(kernel, idle) if self._tuner is not None and kernel in TUNED else None
            mx.eval(kernel(*idle, **settings) if tuning is None else kernel(*idle, tuning=tuning, **settings))
        except self._refusals as error:
            self.refused[name] = str(error)
            LOGGER.log(logging.WARNING, "kernel %s is refused, MLX's own operations run instead: %s", name, error)
            return False
        self._tried[instance] = tuning
        return True


def tile(x: mx.array) -> int:
    """Which instantiation multiplies these vectors: one for each number of few, and one for all others."""
    return min(len(x), MOST_VECTORS + 1)


def zeros(argument: Any) -> Any:
    """An argument of the same kind that nothing has to be computed for; matrices, and what is no array, stay."""
    if isinstance(argument, mx.array):
        return mx.zeros(argument.shape, argument.dtype)
    return tuple(map(zeros, argument)) if isinstance(argument, tuple) else argument


def matrices(args: tuple[Any, ...]) -> list[Q8_0Matrix]:
    """Those among a kernel's arguments."""
    return [a for a in args if isinstance(a, Q8_0Matrix)]


def _refusals(executor: ExecutorName) -> tuple[type[Exception], ...]:
    """What says that a kernel cannot be had. Whatever else the emulator raises is a bug that it has found."""
    if executor == "emulator":
        from kernels.emulator import CompileError

        return (CompileError,)
    return (RuntimeError, ValueError)
