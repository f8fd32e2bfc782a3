"""Compare two files of measurements: old and new time of each component, and the speedup factor.

All values are times, so a factor above 1 means faster. If the samples of both overlap, the table marks the factor: the
difference may be noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_engine.bench.results import Key, Row, read
from mlx_engine.bench.tables import aligned, printable
from mlx_engine.bench.time_changes import HEAD, components, once, timing


def page(old: Path, new: Path) -> str:
    """Return the comparison of two files as Markdown.

    Raises:
        SourceError, FormatError: a file cannot be read, or is not a result of `bench`.
    """
    before, after = read(old), read(new)
    both = [key for key in before if key in after]
    parts = ["# Before and after", _sources(old, new, before, after)]
    for group in dict.fromkeys(key[:-1] for key in both):
        keys = [key for key in both if key[:-1] == group]
        parts += _section(group, [(before[key], after[key]) for key in keys])
    for path, rows, others in ((old, before, after), (new, after, before)):
        alone = [_name(key) for key in rows if key not in others]
        parts += ["\n".join([f"Only in {path}:", "", *(f"- {name}" for name in alone)])] if alone else []
    return "\n\n".join(parts)


def _sources(old: Path, new: Path, before: dict[Key, Row], after: dict[Key, Row]) -> str:
    """Return the origins of both files, and the settings that changed between them."""
    first, last = next(iter(before.values())), next(iter(after.values()))
    lines = [f"- {name}: {path}, {_origin(row)}" for name, path, row in (("old", old, first), ("new", new, last))]
    for name in ("machine", "versions", "model_sha256", "threads"):
        values = [{json.dumps(row.get(name), sort_keys=True) for row in rows.values()} for rows in (before, after)]
        if values[0] != values[1]:
            lines.append(f"- changed: {name}, {_differences(first.get(name), last.get(name))}")
    return "\n".join(lines)


def _origin(row: Row) -> str:
    return f"commit {row.get('commit') or 'unknown'}, {row.get('time') or 'at an unknown time'}"


def _differences(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names) or "in some rows"
    return f"{old} -> {new}" if old != new else "in some rows"


def _name(key: Key) -> str:
    model, backend, jit, overlap, kv, quant, *test = key
    options = [
        "" if jit else "no jit",
        "" if overlap else "no overlap",
        "" if kv else "no cache",
        "" if quant == "keep" else str(quant),
    ]
    return ", ".join(printable(str(part)) for part in (model, backend, *options, *test) if part)


def _section(group: Key, pairs: Sequence[tuple[Row, Row]]) -> Iterable[str]:
    """Yield the times of one backend with one type of weights, then the profile of each test."""
    lines = [once(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs]) for name in ("load", "warm_up")]
    lines += [timing(old, new) for old, new in pairs]
    yield f"## {_name(group)}"
    yield aligned([HEAD, *(line for line in lines if line)])
    for old, new in pairs:
        ours, theirs = old.get("components"), new.get("components")
        if isinstance(ours, dict) and isinstance(theirs, dict):
            phase = "prefill" if new["n_prompt"] else "decode"
            yield f"### {phase}, {new['test']}: one pass, profiled"
            yield from components(ours, theirs)
