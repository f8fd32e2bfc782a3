"""Load and faults of the server as a process: `python -m tests.load` and `python -m tests.load --faults`."""
