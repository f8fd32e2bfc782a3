"""The bottleneck report: the time of each operation in a forward pass, its time at the machine's limits, and advice.

`analysis` runs the passes, sums the spans, compares them with the limits and ranks them; `report` collects everything
as JSON; `page` formats it as Markdown. `bench/compare.py` compares two reports.
"""
