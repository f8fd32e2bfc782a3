"""The bottleneck report: where a pass spends its time, what the machine's limits would leave of it, and what to do.

`runs` measures, `apart` sums what was measured, `gains` sets it beside the limits and ranks, `about` says of what
model it was measured; `report` puts these together, `page` writes them for people, `against` compares two rounds.
"""
