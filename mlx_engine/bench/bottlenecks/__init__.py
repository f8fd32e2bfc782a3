"""The bottleneck report: the time of each operation in a forward pass, its time at the machine's limits, and advice.

`runs` measures, `analysis` sums the spans, compares them with the limits and ranks them, `report` collects everything
as JSON, `page` formats it as Markdown, `against` compares two reports.
"""
