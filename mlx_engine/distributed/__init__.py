"""Run one model on several machines: `mlx.launch` starts a process (rank) on each; MLX sends arrays between them."""
