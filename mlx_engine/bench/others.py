"""How much of the cores other processes use during a measurement: above a limit, its figures are not usable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

# The largest share of the cores at which figures are usable.
MOST = 0.05
# Core seconds that are not counted: the system counts the time of cores and processes in ticks of 10 ms.
TICKS = 0.05
# Core time in which nothing runs, and time that `user` and `nice` have too.
IDLE, TWICE = ("idle", "iowait"), ("guest", "guest_nice")


class OtherProcesses:
    """The core time of all processes but this one and its ended children, from now on.

    Only the cores that this process may use are counted. Time that the host takes from a virtual machine counts, too.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._times()

    def share(self) -> float | None:
        """Return the share, 0 to 1, of the cores that other processes have used; None if the system does not say.

        Too low by 0.05 core seconds, so that ticks of the clocks are not taken for processes.
        """
        whole, busy, own = (now - then for now, then in zip(self._times(), self._start, strict=True))
        return min(1.0, max(0.0, busy - own - TICKS) / whole) if whole > 0 else None

    def _times(self) -> tuple[float, float, float]:
        """Return seconds since the start of the system: of all cores, of the busy ones, and of this process."""
        whole = busy = 0.0
        for core in self._cores():
            times = {name: seconds for name, seconds in core._asdict().items() if name not in TWICE}
            whole += sum(times.values())
            busy += sum(seconds for name, seconds in times.items() if name not in IDLE)
        return whole, busy, sum(self._process.cpu_times()[:4])

    def _cores(self) -> Sequence[Any]:
        """Return the times of each core that this process may use, or of all if the system does not tell which."""
        cores = psutil.cpu_times(percpu=True)
        allowed = self._process.cpu_affinity() if hasattr(self._process, "cpu_affinity") else None
        return [cores[i] for i in allowed] if allowed and max(allowed) < len(cores) else cores


def fields(share: float | None) -> dict[str, Any]:
    """Return a share as fields of a row or a report: `usable` is None if the share is unknown."""
    return {"others_share": share, "usable": None if share is None else share <= MOST}


def disturbed(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the finding as a bold line of a page, or None."""
    text = finding(rows)
    return None if text is None else f"**{text[0].upper()}{text[1:]}.**"


def finding(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence about the rows whose figures are not usable, or None if there are none.

    A row without `test` is a whole report.
    """
    found = [row for row in rows if row.get("usable") is False]
    if not found:
        return None
    names = list(dict.fromkeys(_name(row) for row in found))
    of = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    most = max(row["others_share"] for row in found)
    return (
        f"not usable: {of}: other processes used {most:.0%} of the cores meanwhile, expected at most {MOST:.0%}; "
        "end them and measure again"
    )


def _name(row: dict[str, Any]) -> str:
    if "test" not in row:
        return "all figures"
    clients = f", {row['concurrency']} clients" if "concurrency" in row else ""
    return f"{row['test']}{clients} on {row.get('rung') or row['backend']}"
