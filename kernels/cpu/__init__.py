"""Compiled CPU kernels, each beside its plain NumPy twin. Importing this compiles nothing."""
