"""The common parts of kernels: SIMD vectors, memory access, compilation, jobs and threads."""
