"""Formatting that the sections of BENCHMARKS.md share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measured_code import mark

Row = dict[str, Any]


def figure(value: float) -> str:
    """Return a number with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the median, then the smallest and the largest value; of a single value the value alone."""
    median = figure(statistics.median(values))
    return f"{median} ({figure(min(values))} to {figure(max(values))})" if len(values) > 1 else median


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, n_words: int = 1) -> str:
    """Return a Markdown table; columns after the first `n_words` are numbers."""
    rule = "|" + "---|" * n_words + "--:|" * (len(head) - n_words)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def model(row: Row) -> str:
    """Return name and size of a row's model."""
    return f"{row['model_name']}: {row['model_n_params'] / 1e6:.2f} M parameters, {row['model_size'] / 1e6:.1f} MB"


def source(row: Row) -> str:
    """Return machine, versions and commit of a measurement, and a note if the measured code has changed since."""
    machine, versions = row["machine"], row["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {memory}, {machine['system']}; {packages}; "
        f"commit {row['commit']}, {row['time'][:10]}.{note(row)}"
    )


def note(row: Row) -> str:
    """Return the mark of a row as a sentence, or nothing."""
    found = mark(row)
    return f" **{found.capitalize()}.**" if found else ""
