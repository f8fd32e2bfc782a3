"""Compiled CPU kernels, each with a NumPy reference. Importing this package compiles nothing."""
