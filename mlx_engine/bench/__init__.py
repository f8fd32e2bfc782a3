"""Benchmarks: tests of prefill and decode, the machine's limits, tables, plots and the bottleneck report."""
