"""CPU kernels compiled by Numba, and NumPy references of their results. Importing this package compiles nothing."""
