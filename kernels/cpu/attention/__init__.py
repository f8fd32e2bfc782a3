"""Attention over pages of keys and values, and the heads that it reads."""
