"""`simd` and `parallel` with compiled kernels."""
