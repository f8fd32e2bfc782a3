"""Measuring: cells of a benchmark, what machine they ran on, and tables of the results."""
