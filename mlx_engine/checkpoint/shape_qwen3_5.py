"""A Qwen3.5 of a given shape with random weights, written as a Q8_0 GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.shape_qwen3 import Qwen3Shape, matrix, norm_weight, settings
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight

# Every layer of this number has attention; the others are gated delta networks.
INTERVAL = 4
# The sections of position ids that llama.cpp expects in every file.
SECTIONS = [11, 11, 10, 0]


@dataclass(frozen=True)
class Qwen35Shape(Qwen3Shape):
    """Sizes of a dense Qwen3.5; its delta networks have as many key heads as value heads."""

    n_delta_heads: int
    delta_head_dim: int
    conv_kernel: int


def write_qwen35_shape(path: Path, name: str, shape: Qwen35Shape) -> None:
    """Write the GGUF file of a shape: Q8_0 matrices, F32 norms, a made-up vocabulary of the real size."""
    own = {
        "rope.dimension_count": shape.head_dim // 4,
        "rope.dimension_sections": SECTIONS,
        "full_attention_interval": INTERVAL,
        "ssm.conv_kernel": shape.conv_kernel,
        "ssm.state_size": shape.delta_head_dim,
        "ssm.group_count": shape.n_delta_heads,
        "ssm.time_step_rank": shape.n_delta_heads,
        "ssm.inner_size": shape.n_delta_heads * shape.delta_head_dim,
    }
    metadata = settings("qwen35", name, shape) | {f"qwen35.{key}": value for key, value in own.items()}
    write_gguf(path, metadata, list(weights(shape)))


def weights(shape: Qwen35Shape) -> Iterator[Weight]:
    """Yield random weights, scaled so that activations neither grow nor vanish from layer to layer."""
    rng = np.random.default_rng(0)
    D, F = shape.hidden_size, shape.intermediate_size
    yield matrix(rng, "token_embd", shape.vocab_size, D, 0.6)
    yield norm_weight(rng, "output_norm", D)
    for i in range(shape.n_layers):
        layer = f"blk.{i}."
        yield norm_weight(rng, f"{layer}attn_norm", D)
        yield norm_weight(rng, f"{layer}post_attention_norm", D)
        yield from _delta(rng, layer, shape) if (i + 1) % INTERVAL else _attention(rng, layer, shape)
        for name, rows, columns, gain in (("ffn_gate", F, D, 1.0), ("ffn_up", F, D, 1.0), ("ffn_down", D, F, 0.3)):
            yield matrix(rng, layer + name, rows, columns, gain)


def _attention(rng: np.random.Generator, layer: str, shape: Qwen35Shape) -> Iterator[Weight]:
    """Yield the weights of attention; the rows of queries are followed by those of the gate."""
    D, H, K = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    for name, rows, columns, gain in (
        ("attn_q", 2 * H, D, 1.0), ("attn_k", K, D, 1.0), ("attn_v", K, D, 1.0), ("attn_output", D, H, 0.3),
    ):  # fmt: skip
        yield matrix(rng, layer + name, rows, columns, gain)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield norm_weight(rng, layer + name, shape.head_dim)


def _delta(rng: np.random.Generator, layer: str, shape: Qwen35Shape) -> Iterator[Weight]:
    """Yield the weights of a gated delta network."""
    D, J = shape.hidden_size, shape.n_delta_heads
    inner = J * shape.delta_head_dim
    for name, rows, columns, gain in (
        ("attn_qkv", 3 * inner, D, 1.0), ("attn_gate", inner, D, 1.0), ("ssm_beta", J, D, 1.0),
        ("ssm_alpha", J, D, 1.0), ("ssm_out", D, inner, 0.3),
    ):  # fmt: skip
        yield matrix(rng, layer + name, rows, columns, gain)
    yield norm_weight(rng, f"{layer}ssm_norm", shape.delta_head_dim)
    for name, values in (
        ("ssm_conv1d.weight", rng.standard_normal((3 * inner, shape.conv_kernel)) * shape.conv_kernel**-0.5),
        ("ssm_dt.bias", rng.standard_normal(J)),
        ("ssm_a", -rng.uniform(0.01, 2, J)),
    ):
        yield Weight.pack(layer + name, values, F32)
