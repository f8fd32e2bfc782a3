"""Read an earlier report, check its form, and compare it with a new one of the same model on the same machine.

All values are times, so a factor above 1 means faster. If the quartiles of both overlap, the change may be noise, and
the table says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_engine.bench.compare import HEAD, change
from mlx_engine.bench.results import content
from mlx_engine.bench.tables import aligned, printable
from mlx_engine.errors import FormatError, OptionError, is_number

Report = dict[str, Any]

KIND = "bottlenecks"
# Fields that must be equal in two comparable reports, and fields that may differ.
SAME = {
    "model": ("architecture", "parameters", "layers", "width", "vocabulary"),
    "machine": ("processor", "cores"),
    "settings": ("n_prompt", "n_gen", "depth"),
}


def read(path: Path) -> Report:
    """Read a report.json.

    Raises:
        SourceError: the file cannot be read.
        FormatError: the file is not a bottleneck report.
    """
    try:
        found = json.loads(content(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _error(path, f"invalid JSON: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _error(path, f"kind = {found.get('kind')!r}"[:80] if isinstance(found, dict) else type(found).__name__)
    for name in ("model", "machine", "settings", "backend", "timing", "phases", "versions"):
        if not isinstance(found.get(name), dict):
            raise _error(path, f"{name} = {found.get(name)!r}"[:80])
    for name, of in [*found["timing"].items(), *_operations_of(found, path)]:
        if not all(isinstance(of, dict) and is_number(of.get(key)) and of[key] >= 0 for key in ("median", "q1", "q3")):
            raise _error(path, f"{name} = {of!r}"[:80])
    return found


def _operations_of(report: Report, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the spread of every operation."""
    for name, phase in report["phases"].items():
        ops = phase.get("operations") if isinstance(phase, dict) else None
        if not isinstance(ops, list) or not all(isinstance(op, dict) and isinstance(op.get("role"), str) for op in ops):
            raise _error(path, f"operations of {name} = {ops!r}"[:80])
        for op in ops:
            yield op["role"], op.get("measured_ms")


def _error(path: Path, found: str) -> FormatError:
    hint = "name the report.json that an earlier `report` wrote"
    return FormatError(where=str(path), expected="a bottleneck report", found=found, hint=hint)


CHANGED = {
    "model": ("format", "sha256", "linears_quantised", "weight_bytes"),
    "backend": ("name", "device", "threads", "activations", "kv_type"),
    "settings": ("quant", "quant_min_dim", "quant_layers"),
    "machine": ("system",),
}
# Operations with a smaller share of the pass than this are not compared.
SMALL = 0.005


def differences(old: Report, new: Report, names: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the fields that differ, as "layers 12 -> 26"."""
    pairs = [(name, old[part].get(name), new[part].get(name)) for part, keys in names.items() for name in keys]
    pairs = [(name, printable(str(before)), printable(str(after))) for name, before, after in pairs if before != after]
    return [f"{name.replace('_', ' ')} {before[:40]} -> {after[:40]}" for name, before, after in pairs]


def refuse(old: Report, new: Report) -> None:
    """Check that two reports are comparable.

    Raises:
        OptionError: model, machine or passes differ.
    """
    other = differences(old, new, SAME)
    if other:
        changes = ", ".join(other)[:200]
        message = f"--against: the reports differ ({changes}); --anyway compares them all the same"
        raise OptionError(
            option="--against", expected="the same model, machine and passes", found=changes, message=message
        )


def section(old: Report, new: Report) -> str:
    """Return the comparison as Markdown."""
    other, changed = differences(old, new, SAME), differences(old, new, CHANGED)
    lines = [f"- old: commit {printable(str(old.get('commit') or 'unknown'))}, {printable(str(old.get('time')))}"]
    lines += [f"- **not the same**: {', '.join(other)}; the factors mean little"] if other else []
    lines += [f"- changed: {', '.join(changed)}"] if changed else []
    return "\n\n".join(["## Changes since the earlier report", "\n".join(lines), *tables(old, new)])


def tables(old: Report, new: Report) -> Iterator[str]:
    """Yield a table of the user-visible times, then a table of operations for each kind of pass."""
    names = [name for name in new["timing"] if name in old["timing"]]
    rows = [line(name.replace("_", " "), old["timing"][name], new["timing"][name]) for name in names]
    yield aligned([["", *HEAD[1:]], *rows])
    for name, phase in new["phases"].items():
        if name in old["phases"]:
            found = _operations(old["phases"][name], phase)
            head = [f"{name}, profiled", *HEAD[1:]]
            yield aligned([head, *found])


def _operations(old: Report, new: Report) -> list[list[str]]:
    before, after = ({op["role"]: op["measured_ms"] for op in phase["operations"]} for phase in (old, new))
    floor = SMALL * sum(of["median"] for of in after.values())
    rows = []
    for role in sorted({**before, **after}, key=lambda role: -(after.get(role) or before[role])["median"]):
        found = [of[role] for of in (before, after) if role in of]
        if max(of["median"] for of in found) < floor:
            continue
        old_ms, new_ms = (of[role]["median"] if role in of else None for of in (before, after))
        rows.append(line(printable(role), *found) if len(found) == 2 else change(printable(role), old_ms, new_ms))
    return rows


def line(title: str, old: Report, new: Report) -> list[str]:
    """Return a line with old and new medians and the speedup factor."""
    before, after = old["median"], new["median"]
    overlap = old["q1"] <= new["q3"] and new["q1"] <= old["q3"]
    note = "within the spread" if overlap else "slower" if after > before else ""
    return change(title, before, after, note)
