"""Looking at a run: log events, and the profiler of single operations. Imports nothing of ours."""
