"""Bugs that the default tests must catch: `python -m tests.mutants` plants them."""
