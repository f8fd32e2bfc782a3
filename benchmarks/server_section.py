"""The section of BENCHMARKS.md about the server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.server import N_ANSWERS, N_PROMPT, high
from benchmarks.text import Row, figure, source, spread, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement."""
    row = rows[-1]
    resident, mapped = row["resident_bytes"] / 1e6, row["mapped_bytes"] / 1e6
    words = (
        f"{source(row)}\n\n{row['model_name']}: from the creation of the process to the first 200 of /health "
        f"{spread(row['starts_s'])} s. Idle, it holds {figure(resident)} MB, of which {figure(mapped)} MB are mapped "
        "files.\n\n"
    )
    names = {
        "health_s": f"/health while {N_ANSWERS} answers are generated",
        "gaps_alone_s": "gap between tokens",
        "gaps_beside_prompt_s": f"gap between tokens while a prompt of {N_PROMPT:,} tokens is read",
    }
    lines = [
        [name, figure(statistics.median(row[key]) * 1e3), figure(high(row[key]) * 1e3)] for key, name in names.items()
    ]
    return words + table(["milliseconds", "median", "p99"], lines, n_words=1)
