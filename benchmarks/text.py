"""Words and figures that the sections of BENCHMARKS.md share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def figure(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest behind it; a single value alone."""
    median = figure(statistics.median(values))
    return f"{median} ({figure(min(values))} to {figure(max(values))})" if len(values) > 1 else median


def table(head: Sequence[str], lines: Iterable[Sequence[str]], *, n_words: int = 1) -> str:
    """Markdown; columns after the first `n_words` are numbers."""
    rule = "|" + "---|" * n_words + "--:|" * (len(head) - n_words)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def model(row: Row) -> str:
    """Name and size."""
    return f"{row['model_name']}: {row['model_n_params'] / 1e6:.2f} M parameters, {row['model_size'] / 1e6:.1f} MB"


def source(row: Row) -> str:
    """Machine, versions and commit of a measurement."""
    machine, versions = row["machine"], row["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {memory}, {machine['system']}; {packages}; "
        f"commit {row['commit']}, {row['time'][:10]}."
    )
