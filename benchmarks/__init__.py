"""Benchmarks whose results are committed: settings, all samples, and the page BENCHMARKS.md."""
