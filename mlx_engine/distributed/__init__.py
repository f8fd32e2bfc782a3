"""One model on several machines: ranks are processes that `mlx.launch` starts; MLX carries arrays between them."""
