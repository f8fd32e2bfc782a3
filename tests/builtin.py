"""The sizes of the built-in model, read from its file, so that another model needs no other tests."""

from mlx_engine import open_gguf
from mlx_engine.checkpoint.sources import BUILTIN

with open_gguf(BUILTIN) as file:
    N_LAYERS: int = file.metadata["qwen3.block_count"]
    LONGEST: int = file.metadata["qwen3.context_length"]  # tokens of context
