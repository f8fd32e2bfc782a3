"""Benchmarks whose samples are committed in `benchmarks/results/`; `report.py` makes BENCHMARKS.md from them."""
