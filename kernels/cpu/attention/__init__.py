"""Kernels of attention over pages of keys and values, and of norms and rotary embedding of heads."""
