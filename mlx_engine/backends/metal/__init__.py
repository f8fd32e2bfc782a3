"""`metal` and `cuda`: the `mlx` backend with our own kernels."""
