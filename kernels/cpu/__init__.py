"""Compiled CPU kernels, each with a NumPy twin. Importing this package compiles nothing."""
