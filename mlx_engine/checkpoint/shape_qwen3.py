"""A Qwen3 of a given shape with random weights, written as a Q8_0 GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.shape_vocabulary import gguf_metadata
from mlx_engine.kernels import blocks
from mlx_engine.quant.types import F32, Q8_0
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Qwen3Shape:
    """Sizes of a Qwen3 whose head is tied to its embedding table."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float


def write_shape(path: Path, name: str, shape: Qwen3Shape) -> None:
    """Write the GGUF file of a shape: Q8_0 matrices, F32 norms, a made-up vocabulary of the real size."""
    write_gguf(path, settings("qwen3", name, shape), list(weights(shape)))


def settings(architecture: str, name: str, shape: Qwen3Shape) -> dict[str, object]:
    """Return the metadata of a shape's file."""
    sizes = {
        "block_count": shape.n_layers,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_theta,
    }
    return {
        "general.architecture": architecture,
        "general.name": f"{name} shape, random weights",
        "general.file_type": 7,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        **gguf_metadata(shape.vocab_size),
    }


def weights(shape: Qwen3Shape) -> Iterator[Weight]:
    """Yield random weights, scaled so that activations neither grow nor vanish from layer to layer."""
    rng = np.random.default_rng(0)
    D, F = shape.hidden_size, shape.intermediate_size
    H, K = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield matrix(rng, "token_embd", shape.vocab_size, D, 0.6)
    yield norm_weight(rng, "output_norm", D)
    for i in range(shape.n_layers):
        for norm, n in (
            ("attn_norm", D),
            ("ffn_norm", D),
            ("attn_q_norm", shape.head_dim),
            ("attn_k_norm", shape.head_dim),
        ):
            yield norm_weight(rng, f"blk.{i}.{norm}", n)
        for name, rows, columns, gain in (
            ("attn_q", H, D, 1.0),
            ("attn_k", K, D, 1.0),
            ("attn_v", K, D, 1.0),
            ("attn_output", D, H, 0.3),
            ("ffn_gate", F, D, 1.0),
            ("ffn_up", F, D, 1.0),
            ("ffn_down", D, F, 0.3),
        ):
            yield matrix(rng, f"blk.{i}.{name}", rows, columns, gain)


def matrix(rng: np.random.Generator, name: str, rows: int, columns: int, gain: float) -> Weight:
    """Return a matrix of uniform random quants, which are fast to draw and as fast to multiply as real weights."""
    packed = np.empty(rows * columns // 32, blocks.Q8_0)
    packed["qs"] = rng.integers(-127, 128, (len(packed), 32), dtype=np.int8)
    # Uniform quants from -127 to 127 have a standard deviation of 73.6.
    packed["d"] = gain * columns**-0.5 / 73.6
    return Weight(f"{name}.weight", (rows, columns), Q8_0, packed.view(np.uint8))


def norm_weight(rng: np.random.Generator, name: str, n: int) -> Weight:
    """Return the weight of a norm, of values around 1."""
    return Weight.pack(f"{name}.weight", 1 + 0.1 * rng.standard_normal(n), F32)
