"""Table lines of old and new times: of loading, of a test, and of the components of a profiled pass."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_engine.bench.ladder import figure
from mlx_engine.bench.results import Row
from mlx_engine.bench.tables import aligned, milliseconds
from mlx_engine.errors import is_number

HEAD = ("component", "old ms", "new ms", "factor", "note")
# A slowdown below this factor is noise if there is only one sample.
NOISE = 1.05


def once(name: str, old: Sequence[Row], new: Sequence[Row]) -> list[str] | None:
    """Compare loading and warm-up, which happen once before the measurements."""
    ours, theirs = ([row[f"{name}_s"] * 1e3 for row in rows if is_number(row.get(f"{name}_s"))] for rows in (old, new))
    return _line(name.replace("_", "-"), ours, theirs) if ours and theirs else None


def timing(old: Row, new: Row) -> list[str]:
    """Compare milliseconds per prompt, or per generated token."""
    n = 1 if not new["n_gen"] else new["n_prompt"] + new["n_gen"]
    title = f"prefill, {new['test']}" if not new["n_gen"] else f"per token, {new['test']}"
    times = [[seconds * 1e3 / n for seconds in row["samples_s"]] for row in (old, new)]
    return _line(title, *times, estimated=bool(old.get("estimated") or new.get("estimated")))


def _line(title: str, old: Sequence[float], new: Sequence[float], *, estimated: bool = False) -> list[str]:
    before, after = statistics.median(old), statistics.median(new)
    single = len(old) == 1 or len(new) == 1
    notes = ["slower"] if after > before * (NOISE if single else 1) else []
    if len(old) > 1 and len(new) > 1 and min(old) <= max(new) and min(new) <= max(old):
        notes = ["within the spread"]
    notes += ["estimated"] if estimated else []
    factor = f"x{figure(before / after)}" if before > 0 and after > 0 else "-"
    return [title, milliseconds(before), milliseconds(after), factor, ", ".join(notes)]


def components(old: dict[str, Any], new: dict[str, Any]) -> Iterable[str]:
    """Compare parts of the model, then operations, by time now; name the component with the largest change."""
    before, after = _as_is(old.get("ms")), _as_is(new.get("ms"))
    for title in ("parts", "ops"):
        ours, theirs = _named(old.get(title)), _named(new.get(title))
        lines = _lines({**ours, "all": before}, {**theirs, "all": after})
        yield aligned([(*HEAD[:-1], "share", HEAD[-1]), *(_shared(line, theirs, after) for line in lines)])
    saved = {name: ms - (_named(new.get("ops")).get(name) or 0.0) for name, ms in _named(old.get("ops")).items() if ms}
    if saved and before is not None and after is not None:
        most = max(saved, key=lambda name: abs(saved[name]))
        change = f"{milliseconds(abs(saved[most]))} ms {'less' if saved[most] >= 0 else 'more'}"
        passes = f"A pass of {milliseconds(before)} ms became one of {milliseconds(after)} ms"
        yield f"{passes}; {most} changed most: {change}."


def _named(found: Any) -> dict[str, float | None]:
    """Return milliseconds by name, of parts or of operations."""
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): _as_is(of.get("ms") if isinstance(of, dict) else of) for name, of in items}


def _shared(line: list[str], new: dict[str, float | None], whole: float | None) -> list[str]:
    """Insert the component's current share of the whole into a line."""
    ms = new.get(line[0])
    return [*line[:-1], "-" if not ms or not whole else f"{ms / whole:.1%}", line[-1]]


def _as_is(ms: Any) -> float | None:
    return float(ms) if is_number(ms) else None


def _lines(old: dict[str, float | None], new: dict[str, float | None]) -> list[list[str]]:
    out = []
    for name in sorted({**old, **new}, key=lambda name: (name == "all", -(new.get(name) or 0.0))):
        before, after = old.get(name), new.get(name)
        if before is not None and after is not None:
            out.append(_line(name, [before], [after]))
        elif after is not None:
            out.append([name, "-", milliseconds(after), "-", "only new"])
        elif before is not None:
            out.append([name, milliseconds(before), "-", "-", "only old"])
    return out
