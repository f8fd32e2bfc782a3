"""Bytes on disk: files of metadata and tensors, opened without reading what is not asked for."""

from mlx_engine.checkpoint.gguf import GGUFFile, open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf

__all__ = ["GGUFFile", "open_gguf", "write_gguf"]
