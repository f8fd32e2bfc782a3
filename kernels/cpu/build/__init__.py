"""The common parts of all CPU kernels: SIMD vectors, memory access, compilation, jobs and threads."""
