"""The bottleneck report: the time of each operation in a forward pass, its time at the machine's limits, and advice.

`analysis` runs the passes, adds up the time of each operation, compares it with the limits, and ranks the operations.
`report` returns the report as JSON, and `page` formats it as Markdown. `bench/compare.py` compares two reports.
"""
