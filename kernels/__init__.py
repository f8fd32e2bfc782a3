"""Kernels for Q8_0 and the block layouts they read; usable without mlx_engine, importable without a GPU."""
