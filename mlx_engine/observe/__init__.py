"""Log events, and the profiler of operations. Imports no other part of mlx_engine, so every package may import it."""
