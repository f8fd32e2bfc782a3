"""The tables of a measurement, in Markdown that is readable in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_engine.bench.ladder import figure
from mlx_engine.bench.tables import aligned, printable

Row = dict[str, Any]

# Title and field of each column.
THROUGHPUT = (
    ("t/s", "total_ts"),
    ("gain", "gain"),
    ("t/s each", "request_ts"),
    ("first token ms", "ttft_ms"),
    ("p99", "ttft_p99_ms"),
    ("gap ms", "gap_ms"),
    ("p99", "gap_p99_ms"),
    ("rows/step", "rows_per_step"),
    ("of answers", "decode_rows_per_step"),
    ("of read", "read_share"),
    ("of peak", "peak_share"),
)
PREFIX = (
    ("cold ms", "cold_ttft_ms"),
    ("warm ms", "warm_ttft_ms"),
    ("control ms", "control_ttft_ms"),
    ("warm/cold", "warm_over_cold"),
    ("warm/control", "warm_over_control"),
    ("cached tokens", "cached_tokens"),
)
SHARES = ("read_share", "peak_share")


def markdown(rows: Sequence[Row]) -> str:
    """Return a table with a line per backend and number of clients, and notes on its columns."""
    row = rows[0]
    # A server does not report its steps.
    all_columns = PREFIX if row["shared_prefix"] else THROUGHPUT
    columns = [(title, name) for title, name in all_columns if any(one.get(name) is not None for one in rows)]
    head = ["backend", "threads", "clients", *(title for title, _ in columns)]
    shown = [name for _, name in columns]
    lines = [head, *([*_who(one), *(_cell(one, name) for name in shown)] for one in rows)]
    reasons = {one["backend"]: one["unavailable"] for one in rows if one.get("unavailable")}
    absent = [f"{backend}: not measured, {reason}." for backend, reason in reasons.items()]
    return "\n\n".join([f"{printable(row['model_name'])}, {row['test']}", aligned(lines), *_notes(rows), *absent])


def page(rows: Sequence[Row], plots: Sequence[str]) -> str:
    """Return the page of the output folder: machine, table and plots."""
    row = rows[0]
    machine, versions = row["machine"], ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    where = f"{machine['processor']}, {machine['cores']} cores; {versions}; commit {row['commit']}, {row['time']}."
    return "\n\n".join(["# Clients at once", where, markdown(rows), *(f"![{name}]({name})" for name in plots)]) + "\n"


def _who(row: Row) -> list[str]:
    return [row["backend"], "-" if row["threads"] is None else str(row["threads"]), str(row["concurrency"])]


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return "-"
    mark = "~" if row["estimated"] else ""
    return mark + (f"{value:.0%}" if name in SHARES else figure(value))


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes below the table."""
    row = rows[0]
    loop = f"Each client submits its next of {row['requests_per_client']} requests when its last one has ended."
    if row["shared_prefix"]:
        notes = [
            f"Times to first token, medians. Cold: one client, whose prefix of {row['shared_prefix']:,} tokens is new. "
            "Warm: all clients, with this prefix. Control: prompts of the same length that share nothing."
        ]
    else:
        notes = [
            f"{loop} t/s: generated tokens of all clients, and of one request from its submission to its end. Gap: "
            "between two tokens of an answer. All are medians over rounds."
        ]
    limited = [one for one in rows if one.get("read_gbs") is not None]
    if limited:
        notes.append(
            "Shares: weights, keys and values that all steps read, and their arithmetic, over what the machine reached "
            f"between the runs: {_span(limited, 'read_gbs')} GB/s and {_span(limited, 'peak_gflops')} GFLOP/s."
        )
    if any(one.get("estimated") for one in rows):
        notes.append("~: the budget ended the run.")
    return notes


def _span(rows: Sequence[Row], name: str) -> str:
    low, high = figure(min(row[name] for row in rows)), figure(max(row[name] for row in rows))
    return low if low == high else f"{low} to {high}"
