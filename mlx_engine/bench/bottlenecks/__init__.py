"""The bottleneck report: where a pass spends its time, what the machine's limits would leave of it, and what to do.

`runs` measures, `apart` sums what was measured, `gains` sets it beside the limits and ranks, `advice` says what to do,
`kinds` does this for prefill and for decode, `about` says of which model; `report` puts it together, `page` and
`method` write it for people, `against` compares two rounds.
"""
