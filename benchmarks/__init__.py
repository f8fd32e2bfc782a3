"""Measurements that are kept: what was run, every sample, and the page made of them."""
