"""A Qwen3 with a mixture of experts of a given shape with random weights, written as a Q8_0 GGUF file."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.shape_qwen3 import Qwen3Shape, matrix, norm_weight, settings
from mlx_engine.quant.types import F32, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Qwen3MoeShape(Qwen3Shape):
    """Sizes of a Qwen3-MoE with a head of its own. No layer is dense, so no matrix has the `intermediate_size`."""

    n_experts: int
    n_experts_used: int
    expert_size: int


@dataclass(frozen=True)
class Drawn:
    """A tensor whose random values are drawn when its bytes are written, since all together may exceed the memory."""

    name: str
    shape: tuple[int, ...]
    gain: float
    type: GGMLType = Q8_0

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""
        return self.type.bytes_for(math.prod(self.shape))

    @property
    def data(self) -> NDArray[np.uint8]:
        """The stored bytes."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        if len(self.shape) == 1:
            return norm_weight(rng, self.name, self.shape[0]).data
        rows = math.prod(self.shape[:-1])
        if self.type == Q8_0:
            return matrix(rng, self.name, rows, self.shape[-1], self.gain).data
        values = rng.standard_normal((rows, self.shape[-1])) * self.gain * self.shape[-1] ** -0.5
        return Weight.pack(self.name, values, self.type).data


def write_moe_shape(path: Path, name: str, shape: Qwen3MoeShape) -> None:
    """Write the GGUF file of a shape: Q8_0 matrices, F32 norms and routers, a made-up vocabulary."""
    metadata = settings("qwen3moe", name, shape) | {
        "qwen3moe.expert_count": shape.n_experts,
        "qwen3moe.expert_used_count": shape.n_experts_used,
        "qwen3moe.expert_feed_forward_length": shape.expert_size,
    }
    write_gguf(path, metadata, list(_tensors(shape)))


def _tensors(shape: Qwen3MoeShape) -> Iterator[Drawn]:
    """Yield the tensors, scaled so that activations neither grow nor vanish from layer to layer."""
    D, F, X = shape.hidden_size, shape.expert_size, shape.n_experts
    H, K = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield Drawn("token_embd.weight", (shape.vocab_size, D), 0.6)
    yield Drawn("output_norm.weight", (D,), 1.0, F32)
    yield Drawn("output.weight", (shape.vocab_size, D), 1.0)
    for i in range(shape.n_layers):
        for norm, n in (("attn", D), ("ffn", D), ("attn_q", shape.head_dim), ("attn_k", shape.head_dim)):
            yield Drawn(f"blk.{i}.{norm}_norm.weight", (n,), 1.0, F32)
        yield Drawn(f"blk.{i}.ffn_gate_inp.weight", (X, D), 1.0, F32)
        for name, of, gain in (
            ("attn_q", (H, D), 1.0),
            ("attn_k", (K, D), 1.0),
            ("attn_v", (K, D), 1.0),
            ("attn_output", (D, H), 0.3),
            ("ffn_gate_exps", (X, F, D), 1.0),
            ("ffn_up_exps", (X, F, D), 1.0),
            ("ffn_down_exps", (X, D, F), 0.3),
        ):
            yield Drawn(f"blk.{i}.{name}.weight", of, gain)
