"""Log events and the profiler of operations. Imports no other part of this package."""
