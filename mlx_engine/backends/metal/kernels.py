"""Call our Metal kernels for the `metal` and `cuda` backends. Each kernel is tried on the GPU before its first use.

A GPU's compiler may refuse a kernel. MLX is lazy, so the error would be raised much later, when a result is evaluated.
Therefore each instantiation of a kernel (for certain shapes and types) first runs once on zeros. If the GPU refuses an
instantiation, the method of this kernel returns None from then on, for all shapes, and the caller uses MLX operations
instead. For the kernels in `TUNED`, the fastest launch settings are also chosen before the first use (`tuning.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import mlx.core as mx

from mlx_engine.backends.metal.tuning import Tuner
from mlx_engine.backends.metal.weights import SplitMatrix
from mlx_engine.backends.parameters import HeadNorms, RMSNorm, Scores
from mlx_engine.kernels.launch import ExecutorName
from mlx_engine.kernels.metal.attention import attention
from mlx_engine.kernels.metal.dense import dense
from mlx_engine.kernels.metal.embed_rows import embed_rows
from mlx_engine.kernels.metal.head_norm_rope import head_norm_rope
from mlx_engine.kernels.metal.matvec import matvec
from mlx_engine.kernels.metal.norm_gate_up import norm_gate_up
from mlx_engine.kernels.metal.norm_project import norm_project
from mlx_engine.kernels.metal.norm_qkv import norm_qkv
from mlx_engine.kernels.metal.norm_rows import norm_rows
from mlx_engine.kernels.metal.project_add import project_add
from mlx_engine.kernels.metal.prompt_product import PromptMatrix, prompt_product
from mlx_engine.kernels.metal.prompt_product_tensors import prompt_product_tensors
from mlx_engine.kernels.metal.rows import MOST_VECTORS, Tuning
from mlx_engine.observe.log import LOGGER

T = TypeVar("T")

TUNED: tuple[Callable[..., Any], ...] = (norm_qkv, norm_project, norm_gate_up, project_add, matvec)


class Kernels:
    """The kernels of one executor (metal, cuda or emulator). Every method returns None if its kernel was refused.

    Attributes:
        tensors: whether `prompt_product` first tries the kernel with `matmul2d` (Metal's tensor operations).
        refused: maps the name of each refused kernel to the error message.
    """

    def __init__(self, executor: ExecutorName, tuner: Tuner | None = None, *, tensors: bool = False) -> None:
        self.tensors = tensors
        self.refused: dict[str, str] = {}
        self._refusals = _refusals(executor)
        self._tuner = tuner
        self._tried: dict[Hashable, Tuning | None] = {}

    def norm_qkv(
        self, x: mx.array, norm: RMSNorm, q: SplitMatrix, k: SplitMatrix, v: SplitMatrix
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        return self._normed(norm_qkv, (q.instance, k.instance, v.instance), x, norm, q.matrix, k.matrix, v.matrix)

    def norm_project(self, x: mx.array, norm: RMSNorm, weight: SplitMatrix) -> mx.array | None:
        return self._normed(norm_project, weight.instance, x, norm, weight.matrix)

    def norm_gate_up(
        self, x: mx.array, norm: RMSNorm, gate: SplitMatrix, up: SplitMatrix, activation: Literal["silu", "gelu"]
    ) -> mx.array | None:
        key = gate.instance, up.instance, activation
        return self._normed(norm_gate_up, key, x, norm, gate.matrix, up.matrix, activation)

    def project_add(self, x: mx.array, weight: SplitMatrix, residual: mx.array) -> mx.array | None:
        return self._run(project_add, (tile(x), weight.instance), x, weight.matrix, residual)

    def multiply(self, x: mx.array, weight: SplitMatrix, dtype: mx.Dtype = mx.float32) -> mx.array | None:
        """Return the product of x with a stored matrix, in the type `dtype`: float32 or the type of x."""
        return self._run(matvec, (tile(x), weight.instance, x.dtype, dtype), x, weight.matrix, dtype=dtype)

    def prompt_product(self, x: mx.array, matrix: PromptMatrix) -> mx.array | None:
        """Return the product of many float16 or bfloat16 rows with a matrix, in the type of the rows.

        One instantiation multiplies matrices of all shapes. If `tensors` is false or the kernel with `matmul2d` was
        refused, the kernel with `simdgroup_matrix` is used.
        """
        key = matrix.code, x.dtype, matrix.inputs[-1].dtype
        y = self._run(prompt_product_tensors, key, x, matrix) if self.tensors else None
        return self._run(prompt_product, key, x, matrix) if y is None else y

    def dense(self, x: mx.array, weight: mx.array) -> mx.array | None:
        return self._run(dense, (tile(x), weight.shape), x, weight)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array | None:
        """Return the RMS norm of the rows of x (T, K); K must be a multiple of 32."""
        made = self._run(norm_rows, x.shape[1:], x, weight, eps, True)
        return None if made is None else made[0]

    def rows(self, table: SplitMatrix, ids: mx.array) -> mx.array | None:
        """Return the dequantised rows `ids` (uint32 indices) of an embedding table."""
        return self._run(embed_rows, (len(ids) < 8, table.instance), table.matrix, ids.view(mx.int32))

    def head_norm_rope(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cos_sin: mx.array,
        head_dim: int,
        norms: HeadNorms,
    ) -> tuple[mx.array, mx.array] | None:
        """Return queries (H, T, E), and keys and values in one array (2, G, T, E)."""
        weights = (norms[0].weight, norms[1].weight) if norms else None
        eps = (norms[0].eps, norms[1].eps) if norms else (0.0, 0.0)
        key = q.shape[1], k.shape[1], head_dim, norms is None
        return self._run(head_norm_rope, key, q, k, v, cos_sin, head_dim, weights, eps)

    def attention(
        self,
        q: mx.array,
        store: mx.array,
        pages: mx.array,
        owner: mx.array,
        position: mx.array,
        page: int,
        window: int,
        scores: Scores,
    ) -> mx.array | None:
        """Return attention (R, H, E) of R queries q (R, H, E) over the keys and values in their sequences' pages.

        `store` is the KV store (n, G, slots, row): n is 2 (keys, values), or 1 if the keys are also the values; a row
        has the E elements of one token, or their bytes in Q8_0. `pages`, (B, P) int32, has the first slot of each page
        of each sequence, for up to P pages. `owner` and `position`, (R,) int32, are the index of each query's sequence
        and the position in it. `page` is the number of tokens per page. `window` is as in `batch.first_visible`,
        except that 0 means no limit, in place of None.
        """
        variant = scores.softcap is None, scores.sinks is None
        key = q.shape[1:], store.shape[1], page, window, len(q) < 8, pages.size < 8, variant
        # Try the kernel with a store of one slot, because a second KV store of full size might not fit into memory.
        trial = q, store[:, :, :1], pages, owner, position
        settings = {"page": page, "window": window, "scale": scores.scale, "softcap": scores.softcap}
        settings["sinks"] = scores.sinks
        return self._run(attention, key, q, store, pages, owner, position, trial=trial, **settings)

    def _normed(self, kernel: Callable[..., T], key: Hashable, x: mx.array, norm: RMSNorm, *rest: Any) -> T | None:
        """Run a kernel with a fused norm. For more than `MOST_VECTORS` rows, first run the norm in its own launch."""
        if len(x) <= MOST_VECTORS:
            return self._run(kernel, (len(x), key), x, norm.weight, norm.eps, *rest)
        made = None if kernel.__name__ in self.refused else self._run(norm_rows, x.shape[1:], x, norm.weight, norm.eps)
        if made is None:
            return None
        rows, factors = made
        return self._run(kernel, (tile(x), key), rows, norm.weight, norm.eps, *rest, factors)

    def _run(
        self, kernel: Callable[..., T], key: Hashable, *args: Any, trial: tuple[Any, ...] = (), **settings: Any
    ) -> T | None:
        """Run a kernel, and return its result, or None if it was refused. `key` identifies the instantiation.

        A new key is first tried on zeros, in the shapes and types of `trial`, or of `args` if `trial` is empty.
        """
        name = kernel.__name__
        if name in self.refused:
            return None
        instance = name, key
        if instance not in self._tried and not self._try(kernel, instance, trial or args, settings):
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
        """Try and tune an instantiation. If the GPU refuses it, log a warning and return False."""
        name, idle = instance[0], tuple(map(zeros, args))
        try:
            tuning = self._tuner.choose(kernel, idle) if self._tuner is not None and kernel in TUNED else None
            mx.eval(kernel(*idle, **settings) if tuning is None else kernel(*idle, tuning=tuning, **settings))
        except self._refusals as error:
            self.refused[name] = str(error)
            LOGGER.log(logging.WARNING, "the GPU refuses kernel %s, MLX's own operations run instead: %s", name, error)
            return False
        self._tried[instance] = tuning
        return True


def tile(x: mx.array) -> int:
    """Return the number of rows of x for an instantiation's key; `MOST_VECTORS + 1` stands for all larger numbers."""
    return min(len(x), MOST_VECTORS + 1)


def zeros(argument: Any) -> Any:
    """Return zeros of the same shape and type for an array, or for each array in a tuple; return other values as is.

    The arrays are not evaluated.
    """
    if isinstance(argument, mx.array):
        return mx.zeros(argument.shape, argument.dtype)
    return tuple(map(zeros, argument)) if isinstance(argument, tuple) else argument


def _refusals(executor: ExecutorName) -> tuple[type[Exception], ...]:
    """Return the exceptions by which an executor refuses a kernel.

    The emulator's other exceptions report bugs in kernels, so they are not caught.
    """
    if executor == "emulator":
        from mlx_engine.kernels.emulator import CompileError

        return (CompileError,)
    return (RuntimeError, ValueError)
