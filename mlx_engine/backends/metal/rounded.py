"""The backend `metal` with float16 or bfloat16 activations: MLX operations, and our kernels for products of prompts.

Our kernels multiply 32 or more rows by quantised matrices: `prompt_product_tensors` on GPUs with neural accelerators,
`prompt_product` on other GPUs. Both kernels support Q6_K, and MLX's affine format with 4 or 8 bits. Q8_0, Q4_0 and Q4_K
matrices are converted to the affine format on load. MLX multiplies fewer than 32 rows by affine matrices. The affine
format cannot express Q6_K, so our kernel `matvec` multiplies fewer than 32 rows by Q6_K matrices.

MLX multiplies matrices of other quantised types (MXFP4, for example). Float matrices, experts and attention use MLX
operations, because MLX's kernels for them already use the GPU's matrix units.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_engine.backends.metal.backend import ExecutorBackend
from mlx_engine.backends.metal.kernels import Kernels
from mlx_engine.backends.metal.tuning import tuner
from mlx_engine.backends.metal.weights import SplitMatrix, split
from mlx_engine.backends.mlx.weights import GroupMatrix
from mlx_engine.backends.parameters import Native
from mlx_engine.errors import OptionError
from mlx_engine.kernels.launch import ExecutorName
from mlx_engine.kernels.metal.formats import GROUPS, KINDS
from mlx_engine.kernels.metal.layout import AffineMatrix
from mlx_engine.kernels.metal.prompt_product import FEWEST
from mlx_engine.kernels.metal.prompt_product_tensors import has_accelerators
from mlx_engine.quant.weight import Weight

# An environment variable that selects the kernel for prompts: "on" for `prompt_product_tensors`, which uses Metal 4's
# `matmul2d`; "off" for `prompt_product`, which uses `simdgroup_matrix`. If the variable is unset, GPUs with neural
# accelerators get `prompt_product_tensors`.
VARIABLE = "MLX_ENGINE_TENSORS"


class RoundedMetalBackend(ExecutorBackend):
    """The `mlx` backend with our kernels for products of prompts, and for all products with Q6_K matrices."""

    def __init__(self, activations: str, executor: ExecutorName) -> None:
        super().__init__(activations, executor)
        self.prompts = Kernels(executor, tuner(executor), tensors=uses_tensors(executor))

    def prepare(self, weight: Weight) -> Native:
        """Prepare a weight as `MlxBackend` does, but keep Q6_K matrices with finite scales in their stored type.

        Matrices in MLX's affine format become `PromptMatrix`, if our kernels support their bits and group size.
        """
        if weight.type.name == "Q6_K":
            matrix = split(weight, self.prompts)
            return super().prepare(weight) if matrix is None else StoredPromptMatrix(matrix.matrix, self.prompts)
        made: mx.array | GroupMatrix = super().prepare(weight)
        if not isinstance(made, GroupMatrix) or made.biases is None:
            return made
        if made.mode != "affine" or made.bits not in KINDS or made.group not in GROUPS:
            return made
        return PromptMatrix(made.wq, made.scales, made.biases, made.group, made.bits, kernels=self.prompts)


def uses_tensors(executor: ExecutorName) -> bool:
    """Return whether products of prompts use `prompt_product_tensors`.

    Raises:
        OptionError: `VARIABLE` is set to another value than "on" or "off".
    """
    chosen = os.environ.get(VARIABLE)
    if chosen not in (None, "on", "off"):
        raise OptionError(f"{VARIABLE} must be 'on', 'off' or unset, not {chosen!r}", option=VARIABLE, found=chosen)
    return has_accelerators() and executor == "metal" if chosen is None else chosen == "on"


@dataclass(frozen=True, eq=False)
class PromptMatrix(GroupMatrix):
    """A matrix in MLX's affine format. If x has at least `FEWEST` rows, our kernels compute the product, else MLX."""

    kernels: Kernels = field(kw_only=True, repr=False)

    def multiply(self, x: mx.array) -> mx.array:
        y = None
        if len(x) >= FEWEST and self.biases is not None:
            matrix = AffineMatrix(self.wq, self.scales, self.biases, self.group, self.bits)
            y = self.kernels.prompt_product(x, matrix)
        return super().multiply(x) if y is None else y


@dataclass(frozen=True, eq=False)
class StoredPromptMatrix(SplitMatrix):
    """A Q6_K matrix in its stored type."""

    def multiply(self, x: mx.array) -> mx.array:
        kernels, is_prompt = self.kernels, len(x) >= FEWEST
        y = kernels.prompt_product(x, self.matrix) if is_prompt else kernels.multiply(x, self, x.dtype)
        return x @ self.matrix.dequantized().astype(x.dtype).T if y is None else y
