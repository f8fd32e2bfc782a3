"""Checkpoints with the shapes of real models and random weights ("shape:gpt2"), to benchmark without a download.

Each is written once, to the user's cache folder: Qwen3 as a Q8_0 GGUF file, others as Hugging Face folders. Their
generated text is noise; their timings are valid, because speed does not depend on the values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernels import blocks
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.shape_folders import FolderShape, Gemma3Shape, GPT2Shape, Progress, write_folder
from mlx_engine.checkpoint.shape_vocabulary import gguf_metadata
from mlx_engine.checkpoint.sources import PREFIX
from mlx_engine.errors import SourceError
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


SHAPES: dict[str, Qwen3Shape | FolderShape] = {
    "qwen3-0.6b": Qwen3Shape(28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    "gpt2": GPT2Shape(12, 768, 12, 50_257, 1024),
    "gemma3-1b": Gemma3Shape(26, 1152, 6912, 4, 1, 256, 262_144, 32_768, 512),
}


def shape_path(name: str, progress: Progress | None = None) -> Path:
    """Return the path of the checkpoint of this shape; write it first if it does not exist.

    For a folder, `progress` is called with (pieces written, total pieces).

    Raises:
        SourceError: there is no such shape, or the cache folder cannot be written.
    """
    if name not in SHAPES:
        raise SourceError(f"{PREFIX}{name}: expected one of {', '.join(SHAPES)}, found none of this name")
    shape = SHAPES[name]
    suffix = "q8_0.gguf" if isinstance(shape, Qwen3Shape) else shape.type.name.lower()
    path = cache_folder() / f"{name}-{suffix}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{path.parent}: cannot be made ({error.strerror}); set XDG_CACHE_HOME") from error
    if isinstance(shape, Qwen3Shape):
        write_shape(path, name, shape)
    else:
        write_folder(path, shape, progress)
    return path


def cache_folder() -> Path:
    """Return the folder for files that can be regenerated: XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    return Path(cache) / "mlx_engine"


def write_shape(path: Path, name: str, shape: Qwen3Shape) -> None:
    """Write the GGUF file of a shape: Q8_0 matrices, F32 norms, a made-up vocabulary of the real size."""
    metadata = {
        "general.architecture": "qwen3",
        "general.name": f"{name} shape, random weights",
        "general.file_type": 7,
        "qwen3.block_count": shape.n_layers,
        "qwen3.context_length": shape.context_length,
        "qwen3.embedding_length": shape.hidden_size,
        "qwen3.feed_forward_length": shape.intermediate_size,
        "qwen3.attention.head_count": shape.n_heads,
        "qwen3.attention.head_count_kv": shape.n_kv_heads,
        "qwen3.attention.key_length": shape.head_dim,
        "qwen3.attention.value_length": shape.head_dim,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": shape.rope_theta,
        **gguf_metadata(shape.vocab_size),
    }
    write_gguf(path, metadata, list(weights(shape)))


def weights(shape: Qwen3Shape) -> Iterator[Weight]:
    """Yield random weights, scaled so that activations neither grow nor vanish from layer to layer."""
    rng = np.random.default_rng(0)
    D, F = shape.hidden_size, shape.intermediate_size
    H, K = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield _matrix(rng, "token_embd", shape.vocab_size, D, 0.6)
    yield _norm(rng, "output_norm", D)
    for i in range(shape.n_layers):
        for norm, n in (
            ("attn_norm", D),
            ("ffn_norm", D),
            ("attn_q_norm", shape.head_dim),
            ("attn_k_norm", shape.head_dim),
        ):
            yield _norm(rng, f"blk.{i}.{norm}", n)
        for name, rows, columns, gain in (
            ("attn_q", H, D, 1.0),
            ("attn_k", K, D, 1.0),
            ("attn_v", K, D, 1.0),
            ("attn_output", D, H, 0.3),
            ("ffn_gate", F, D, 1.0),
            ("ffn_up", F, D, 1.0),
            ("ffn_down", D, F, 0.3),
        ):
            yield _matrix(rng, f"blk.{i}.{name}", rows, columns, gain)


def _matrix(rng: np.random.Generator, name: str, rows: int, columns: int, gain: float) -> Weight:
    """Return a matrix of uniform random quants, which are fast to draw and as fast to multiply as real weights."""
    packed = np.empty(rows * columns // 32, blocks.Q8_0)
    packed["qs"] = rng.integers(-127, 128, (len(packed), 32), dtype=np.int8)
    # Uniform quants from -127 to 127 have a standard deviation of 73.6.
    packed["d"] = gain * columns**-0.5 / 73.6
    return Weight(f"{name}.weight", (rows, columns), Q8_0, packed.view(np.uint8))


def _norm(rng: np.random.Generator, name: str, n: int) -> Weight:
    return Weight.pack(f"{name}.weight", 1 + 0.1 * rng.standard_normal(n), F32)
