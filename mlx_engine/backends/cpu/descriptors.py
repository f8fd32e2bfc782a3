"""Make the descriptors from which the compiled CPU kernels read their parameters.

A descriptor is an array of int64 words, which `kernels/cpu/build/layout.py` names. It describes a block (linear layers
with the same input), a norm or a mixture of experts by the addresses, shapes and formats of the weights. An address
does not keep its array in memory, so `Block` and `ExpertBlock` also hold references to the arrays.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.experts import Experts, Routing
from mlx_engine.backends.parameters import Convolution, DeltaRule, Gating, LayerNorm, Linear, Mamba2, Norm, Scores
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library

# The format of matrices that are float32, or are expanded to float32 when they are loaded.
FLOAT32 = "float32"

# Maps each activation function, and clamped SwiGLU, to its number in descriptors and in the steps of programs.
KINDS: dict[Gating, int] = {
    "silu": layout.SILU, "gelu": layout.GELU, "gelu_erf": layout.GELU_ERF, "relu2": layout.RELU2,
    "clamped_swiglu": layout.CLAMPED_SWIGLU,
}  # fmt: skip


def address(array: np.ndarray | None) -> int:
    """Return the address of an array; 0 for None. For a writable array, this is 4 times as fast as `.ctypes.data`."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # None, read-only, empty, or not contiguous
        return 0 if array is None else int(array.ctypes.data)


def aligned(*shape: int, make: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """Return a float32 array that begins at the start of a cache line, so that kernels access whole cache lines.

    `make`, `np.empty` or `np.zeros`, allocates the memory.
    """
    n = math.prod(shape)
    memory = make(n + layout.LANES, dtype=np.float32)
    first = -address(memory) % (4 * layout.LANES) // 4
    return memory[first : first + n].reshape(shape)


def strided_rows(x: np.ndarray) -> np.ndarray:
    """Return x (rows, columns) if each row is contiguous (x may be a slice of columns), else a contiguous copy."""
    return x if x.strides[1] == x.itemsize and x.strides[0] >= 0 else np.ascontiguousarray(x)


def contiguous(x: np.ndarray) -> np.ndarray:
    """Return x if it is C-contiguous, else a C-contiguous copy."""
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix of weights.

    Attributes:
        shape: (N, K).
        format: the storage format, such as "q8_0" or "float32": one of `library.FORMATS`, or an affine format of MLX.
        data: the bytes of the quantised blocks (one-dimensional), or float32 (N, K).
    """

    shape: tuple[int, int]
    format: str
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


class Block:
    """Linear layers with the same input, encoded for the compiled kernels. The outputs of a token form one row.

    If `activation` is 0, the row is the concatenated outputs of all layers. Otherwise `activation` is a number in
    `KINDS`, and there are one or two layers: the row of two layers, gate and up, is `activation(gate) * up` or clamped
    SwiGLU, and the row of one layer is `activation(up)`. The norm `norm` is applied to the input, and the norm `post`
    to the output. With `fixed`, quantised matrices are multiplied in fixed point.
    """

    def __init__(
        self, linears: Sequence[Linear], norm: Norm | None, activation: int, library: Library, post: Norm | None = None,
        *, fixed: bool = False,
    ) -> None:  # fmt: skip
        self.linears, self.norm, self.post = tuple(linears), norm, post  # keeps the arrays alive
        matrices: list[Matrix] = [linear.weight for linear in linears]
        gated = activation != 0 and len(matrices) == 2
        rows = [matrix.shape[0] for matrix in matrices]
        edges = np.cumsum([0, *rows]).tolist()
        # The columns of each layer in the output.
        self.columns = [slice(first, last) for first, last in itertools.pairwise(edges)]
        self.n_outputs, self.n_inputs = rows[0] if gated else sum(rows), matrices[0].shape[1]
        self.descriptor = descriptor = np.zeros(layout.TABLE + layout.WIDTH * len(matrices), dtype=np.int64)
        self.address = address(descriptor)

        descriptor[layout.TASK_GEMV] = library.address("multiply_stored")
        descriptor[layout.TASK_GEMM] = library.address("multiply_rows")
        descriptor[layout.TASK_PREPARE] = library.address("prepare_rows")
        for of, first in ((norm, layout.NORM_WEIGHT), (post, layout.POST_NORM_WEIGHT)):
            if of is not None:
                write_norm(descriptor[first : first + 3], of)
        descriptor[layout.N], descriptor[layout.K] = self.n_outputs, self.n_inputs
        descriptor[layout.ACTIVATION] = activation
        self._write_chunks(matrices, gated)
        descriptor[layout.MATRICES] = len(matrices)
        # gemv needs inputs that fill whole SIMD vectors. Gate and up must have the same format, because gemv
        # interleaves their rows.
        self.has_gemv = self.n_inputs % layout.LANES == 0 and not (gated and matrices[0].format != matrices[1].format)
        descriptor[layout.HAS_GEMV] = self.has_gemv
        for matrix, linear, column, row in zip(matrices, linears, edges, self.table(), strict=False):
            write_matrix(row, matrix, library)
            row[layout.BIAS] = address(linear.bias)
            row[layout.COLUMN] = 0 if gated else column
        self.n_fixed = 0
        # Gate and up are multiplied in the same chunks, so fixed point is used only if both are quantised. To quantise
        # the inputs of up to 12 tokens takes 29.5 bytes of scratch memory per column; 32 is an upper bound.
        fits = 32 * self.n_inputs <= layout.SCRATCH_BYTES
        if fixed and fits and not (gated and any(matrix.format == FLOAT32 for matrix in matrices)):
            self._write_panels(matrices, library)

    def _write_panels(self, matrices: Sequence[Matrix], library: Library) -> None:
        """Write the words for products in fixed point: the kernels of each quantised matrix, and the block's tasks."""
        for matrix, row in zip(matrices, self.table(), strict=False):
            if matrix.format != FLOAT32:
                row[layout.PANEL : layout.WIDTH] = library.panels(matrix.format)
                self.n_fixed += 1
        if self.n_fixed:
            self.descriptor[layout.FIXED] = self.n_fixed
            self.descriptor[layout.FIXED_GEMM] = library.address("multiply_fixed")
            self.descriptor[layout.FIXED_PREPARE] = library.address("prepare_fixed")
            self.descriptor[layout.FIXED_GEMV] = library.address("multiply_fixed_stored")
            self.descriptor[layout.FIXED_RECORDS] = library.address("prepare_records")

    def _write_chunks(self, matrices: Sequence[Matrix], gated: bool) -> None:
        """Write the rows per chunk, and whether several threads share the work if there are few tokens (HAND_OUT).

        These words depend only on the matrices, not on the number of threads.
        """
        row_bytes = sum(matrix.nbytes // matrix.shape[0] for matrix in matrices[: 2 if gated else 1])
        nbytes = sum(matrix.nbytes for matrix in matrices)
        chunk_bytes = max(layout.CHUNK_BYTES, min(nbytes // layout.LONG_JOB, layout.MOST_CHUNK_BYTES))
        self.descriptor[layout.CHUNK_GEMV] = max(16, chunk_bytes // max(1, row_bytes) // 16 * 16)
        self.descriptor[layout.CHUNK_GEMM] = layout.GEMM_ROWS // 2 if gated else layout.GEMM_ROWS
        self.descriptor[layout.HAND_OUT] = nbytes > layout.CHUNK_BYTES

    def table(self) -> np.ndarray:
        """Return the words of all matrices, (matrices, WIDTH), as a view of the descriptor."""
        return self.descriptor[layout.TABLE :].reshape(-1, layout.WIDTH)


def write_matrix(descriptor: np.ndarray, matrix: Matrix, library: Library) -> None:
    """Write a matrix's int64 words: its address, its number of rows, and the kernels of its format."""
    descriptor[layout.WEIGHTS], descriptor[layout.ROWS] = address(matrix.data), matrix.shape[0]
    descriptor[layout.FORMAT : layout.PANEL] = library.format(matrix.format)


def write_norm(descriptor: np.ndarray, norm: Norm) -> None:
    """Write a norm's int64 words: the weight's address, eps (float64), and for a layer norm the bias's address."""
    descriptor[0], descriptor[1:2].view(np.float64)[0] = address(norm.weight), norm.eps
    if isinstance(norm, LayerNorm):
        descriptor[2] = address(norm.bias)


def norm_descriptor(norm: Norm | None) -> np.ndarray | None:
    """Return the descriptor of a norm that is not part of a block; None if `norm` is None."""
    if norm is None:
        return None
    descriptor = np.zeros(3, dtype=np.int64)
    write_norm(descriptor, norm)
    return descriptor


def sinks_address(scores: Scores, n_heads: int) -> int:
    """Return the address of the sinks (H,) of attention; 0 if there are none.

    Raises:
        ValueError: the sinks are not a contiguous array with one float32 per query head.
    """
    sinks = scores.sinks
    if sinks is None:
        return 0
    if sinks.shape != (n_heads,) or sinks.dtype != np.float32 or not sinks.flags.c_contiguous:
        raise ValueError(f"sinks must be ({n_heads},) of float32, not {sinks.shape} of {sinks.dtype}")
    return address(sinks)


class ExpertBlock:
    """A mixture of experts, encoded for the kernel `run_experts`.

    With `adds`, the kernel applies `experts.post_norm` (if it is not None) to the sum of the experts' outputs, and then
    adds the residual. With `fixed`, quantised matrices are multiplied in fixed point.
    """

    def __init__(
        self, experts: Experts, norm: Norm, activation: int, library: Library, *, adds: bool = True, fixed: bool = False
    ) -> None:
        def block(linears: Sequence[Linear], kind: int = 0) -> Block:
            return Block(linears, None, kind, library, fixed=fixed)

        self.norm, self.router = norm, block((experts.router,))  # keeps the arrays alive
        matrices = zip(*(linear.weights for linear in experts.matrices), strict=True)
        self.blocks = [(block(first, activation), block((down,))) for *first, down in matrices]
        self.inner, self.width = experts.up.shape
        shared, self.shared = experts.shared, list[Block]()
        if shared is not None:
            inner = (shared.up,) if shared.gate is None else (shared.gate, shared.up)
            self.inner = max(self.inner, shared.up.weight.shape[0])
            self.shared = [block(inner, KINDS[shared.activation]), block((shared.down,))]
            self.shared += [] if shared.weight is None else [block((shared.weight,))]
        self.n_experts, self.n_used = experts.n_experts, experts.routing.n_used
        self.descriptor = descriptor = np.zeros(layout.EX_TABLE + 2 * self.n_experts, dtype=np.int64)
        self.address = address(descriptor)
        write_norm(descriptor[layout.EX_NORM_WEIGHT : layout.EX_NORM_BIAS + 1], norm)
        descriptor[layout.EX_PROJECT], descriptor[layout.EX_ROUTER] = library.address("project"), self.router.address
        descriptor[layout.EX_COUNT], descriptor[layout.EX_USED] = self.n_experts, self.n_used
        descriptor[layout.EX_NORMALIZE] = experts.routing.normalize
        descriptor[layout.EX_WIDTH], descriptor[layout.EX_INNER] = self.width, self.inner
        descriptor[layout.EX_ADDS] = adds
        self.norms = (experts.router_norm, experts.post_norm if adds else None)
        for first, own in zip((layout.EX_ROUTER_NORM, layout.EX_POST_NORM), self.norms, strict=True):
            if own is not None:
                write_norm(descriptor[first : first + 2], own)
        descriptor[layout.EX_SCALES] = address(experts.routing.scales)
        descriptor[layout.EX_SHARED : layout.EX_SHARED + len(self.shared)] = [block.address for block in self.shared]
        self._write_routing(experts.routing)
        descriptor[layout.EX_TABLE :] = [block.address for pair in self.blocks for block in pair]

    def _write_routing(self, routing: Routing) -> None:
        descriptor, self.routing = self.descriptor, routing  # keeps the arrays of `routing` alive
        descriptor[layout.EX_SIGMOID] = routing.scoring == "sigmoid"
        descriptor[layout.EX_CHOICE_BIAS] = address(routing.bias)
        descriptor[layout.EX_GROUPS], descriptor[layout.EX_GROUPS_USED] = routing.groups or (0, 0)
        descriptor[layout.EX_SUM_EPS : layout.EX_SUM_EPS + 1].view(np.float64)[:] = routing.sum_eps
        descriptor[layout.EX_WEIGHS_INPUTS] = routing.weighs_inputs

    def guesses(self, other: ExpertBlock) -> bool:
        """Return whether this mixture's kernel can predict which experts `other`, the next mixture, will choose.

        So these experts can be read from the file in advance (`expert_cache.py`).

        Both mixtures must have the same numbers of experts and of experts per token, and the same width.
        """
        return (self.n_experts, self.n_used, self.width) == (other.n_experts, other.n_used, other.width)

    def floats(self, n_tokens: int) -> int:
        """Return the number of floats of scratch memory for `n_tokens` tokens, including the scratch of products."""
        waits = bool(self.descriptor[layout.EX_STATE])
        own = layout.expert_scratch(n_tokens, self.n_experts, self.n_used, self.width, self.inner, waits=waits)
        return own + n_tokens * layout.product_floats(max(self.width, self.inner))


def norm_fits(norm: Norm | None) -> bool:
    """Return whether PANEL_TOKENS normed vectors, the most that gemv multiplies, fit into a thread's scratch memory.

    Return True if there is no norm.
    """
    return norm is None or 4 * layout.PANEL_TOKENS * int(norm.weight.size) <= layout.SCRATCH_BYTES


def convolution_fits(conv: Convolution) -> bool:
    """Return whether the kernels support the number of channels of a convolution."""
    return int(conv.weight.shape[1]) % layout.LANES == 0


def rule_fits(rule: DeltaRule) -> bool:
    """Return whether the kernels support the head dims of a delta rule."""
    return rule.key_dim % layout.LANES == 0 and rule.value_dim % layout.LANES == 0 and rule.key_dim <= layout.STRETCH


def space_fits(net: Mamba2) -> bool:
    """Return whether the kernels support the head dim of a state space, and the width of its norm's groups."""
    space = net.space
    width = space.n_heads * space.head_dim // net.norm_groups
    return space.head_dim % layout.LANES == 0 and width % layout.LANES == 0


def heads_fit(group: int, width: int, kv_type: str) -> bool:
    """Return whether attention supports `group` query heads per KV head, the head dim `width` and this KV type."""
    return (
        width % layout.LANES == 0
        and width <= layout.STRETCH
        and layout.attention_scratch(group, width, layout.KV_TYPES[kv_type]) <= layout.SCRATCH_BYTES
    )
