"""Kernels of matrix products, with the norms and activations before and after them, and of mixtures of experts."""
