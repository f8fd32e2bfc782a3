"""Compiled CPU kernels, and NumPy references of their results. Importing this package compiles nothing."""
