"""Backends in plain Python and NumPy: `scalar`, `simd`, and `parallel` without compiled kernels."""
