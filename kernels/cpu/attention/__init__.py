"""Attention over pages of keys and values; norms and rotary embedding of heads."""
