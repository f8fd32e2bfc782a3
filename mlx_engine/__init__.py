"""A small, readable LLM inference engine; logits are returned as MLX arrays.

The public names are `load`, `Engine`, `Constraint`, `Tensor`, `create_backend`, `open_gguf`, `load_tokenizer` and
`errors`. Each is imported on first use, so that `import mlx_engine` is fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# MLX reads these environment variables when it is imported, after these lines. The user's values are kept. By default,
# MLX may compute float32 matrix products in TensorFloat-32, which rounds inputs to 10 bits of mantissa.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
if sys.platform == "darwin":
    # By default MLX ends a Metal command buffer after about 50 operations or 50 MB of inputs, including weights. Then a
    # token needs about a dozen command buffers, which cost about 20 us each.
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "1000")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "400")

__version__ = "0.4.0"

__all__ = ["Constraint", "Engine", "Tensor", "create_backend", "errors", "load", "load_tokenizer", "open_gguf"]

if TYPE_CHECKING:
    from mlx.core import array as Tensor  # noqa: N812

    from mlx_engine import errors
    from mlx_engine.backends import create_backend
    from mlx_engine.checkpoint.gguf import open_gguf
    from mlx_engine.constraint import Constraint
    from mlx_engine.engine import Engine, load
    from mlx_engine.tokenizer import load_tokenizer

# Maps each public name, except `errors`, to its module and its name there.
_HOMES = {
    "Constraint": ("mlx_engine.constraint", "Constraint"),
    "Engine": ("mlx_engine.engine", "Engine"),
    "Tensor": ("mlx.core", "array"),
    "create_backend": ("mlx_engine.backends", "create_backend"),
    "load": ("mlx_engine.engine", "load"),
    "load_tokenizer": ("mlx_engine.tokenizer", "load_tokenizer"),
    "open_gguf": ("mlx_engine.checkpoint.gguf", "open_gguf"),
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("mlx_engine.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_engine' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
