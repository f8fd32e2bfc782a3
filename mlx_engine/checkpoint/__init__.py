"""Read and write model files: GGUF, safetensors and Hugging Face folders. Files are memory-mapped."""

from mlx_engine.checkpoint.gguf import GGUFFile, open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf

__all__ = ["GGUFFile", "open_gguf", "write_gguf"]
