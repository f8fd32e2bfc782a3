"""`mlx`: stock MLX operations."""
