"""The bottleneck report: the time of each operation in a forward pass, its time at the machine's limits, and advice.

`runs` measures, `apart` sums the spans, `gains` compares them with the limits and ranks them, `advice` words the
advice, `kinds` combines these for prefill and for decode, `about` describes the model. `report` collects everything as
JSON, `page` and `method` format it as Markdown, `against` compares two reports.
"""
