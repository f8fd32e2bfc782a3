"""Benchmarks of several clients at once: through the scheduler, or over HTTP.

Each client runs a closed loop: it submits its next request when its last one has ended. `load.py` makes the prompts,
`scheduled.py` and `served.py` run the clients, `figures.py` computes the figures of a run, `measure.py` and `prefix.py`
repeat runs in interleaved rounds, `rows.py` makes the rows, `tables.py` and `plot.py` show them.
"""
