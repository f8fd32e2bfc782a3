"""Benchmarks of several clients at once: through the scheduler, or over HTTP.

Each client runs a closed loop: it submits its next request when its last one has ended. `load` makes the prompts and
computes the figures of a run, `clients` runs the clients, `measure` repeats runs in interleaved rounds and makes rows.
"""
