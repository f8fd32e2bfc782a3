"""Compare measurements: two files of `bench`, or two bottleneck reports of the same model and machine.

A factor is the old time divided by the new time: if it is above 1, the new run is faster. The note "within the spread"
means that the difference may be noise, because the ranges of both measurements overlap. In files of `bench`, a range is
from the minimum to the maximum of the samples; in reports, from the first to the third quartile.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_engine.backends import EXACT
from mlx_engine.bench.tables import Key, Row, aligned, content, figure, milliseconds, printable, read
from mlx_engine.errors import FormatError, OptionError, is_number

HEAD = ("component", "old ms", "new ms", "factor", "note")
# If the old or the new time has only one sample, a slowdown by at most this factor counts as noise.
NOISE = 1.05


def once(name: str, old: Sequence[Row], new: Sequence[Row]) -> list[str] | None:
    """Return a line that compares the time of loading (`name` is "load") or of the warm-up ("warm_up").

    Return None if one of the files has no such time.
    """
    before, after = ([row[f"{name}_s"] * 1e3 for row in rows if is_number(row.get(f"{name}_s"))] for rows in (old, new))
    return _line(name.replace("_", "-"), before, after) if before and after else None


def timing(old: Row, new: Row) -> list[str]:
    """Return a line that compares the times of a test.

    If the test is only a prefill, compare its milliseconds, else the milliseconds per token of prompt and answer.
    """
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
    return change(title, before, after, ", ".join(notes))


def change(title: str, before: float | None, after: float | None, note: str = "") -> list[str]:
    """Return a line with old and new milliseconds and the speedup factor; either time may be None."""
    absent = "only new" if before is None else "only old" if after is None else ""
    times = ["-" if ms is None else milliseconds(ms) for ms in (before, after)]
    return [title, *times, f"x{figure(before / after)}" if before and after else "-", note or absent]


def component_tables(old: dict[str, Any], new: dict[str, Any]) -> Iterable[str]:
    """Yield a table of the model's parts, a table of its operations, and a sentence that names the largest change."""
    before, after = _as_is(old.get("ms")), _as_is(new.get("ms"))
    for title in ("parts", "ops"):
        old_ms, new_ms = _named(old.get(title)), _named(new.get(title))
        lines = _lines({**old_ms, "all": before}, {**new_ms, "all": after})
        yield aligned([(*HEAD[:-1], "share", HEAD[-1]), *(_shared(line, new_ms, after) for line in lines)])
    saved = {name: ms - (_named(new.get("ops")).get(name) or 0.0) for name, ms in _named(old.get("ops")).items() if ms}
    if saved and before is not None and after is not None:
        most = max(saved, key=lambda name: abs(saved[name]))
        amount = f"{milliseconds(abs(saved[most]))} ms {'less' if saved[most] >= 0 else 'more'}"
        passes = f"A pass of {milliseconds(before)} ms became one of {milliseconds(after)} ms"
        yield f"{passes}; {most} changed most: {amount}."


def _named(found: Any) -> dict[str, float | None]:
    """Map the name of each part or operation to its milliseconds, or to None if these are unknown."""
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): _as_is(of.get("ms") if isinstance(of, dict) else of) for name, of in items}


def _shared(line: list[str], new: dict[str, float | None], whole: float | None) -> list[str]:
    """Insert a component's share of the new pass, which takes `whole` ms, before the note of the component's line."""
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
        elif before is not None or after is not None:
            out.append(change(name, before, after))
    return out


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
    model, backend, activations, kv_type, jit, overlap, kv, quant, *test = key
    options = [
        "" if activations == EXACT else str(activations),
        "" if kv_type == "f32" else f"keys and values {kv_type}",
        "" if jit else "no jit",
        "" if overlap else "no overlap",
        "" if kv else "no cache",
        "" if quant == "keep" else str(quant),
    ]
    return ", ".join(printable(str(part)) for part in (model, backend, *options, *test) if part)


def _section(group: Key, pairs: Sequence[tuple[Row, Row]]) -> Iterable[str]:
    """Yield the comparison of tests with the same model, backend and options: a table of times, then the profiles."""
    lines = [once(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs]) for name in ("load", "warm_up")]
    lines += [timing(old, new) for old, new in pairs]
    yield f"## {_name(group)}"
    yield aligned([HEAD, *(line for line in lines if line)])
    for old, new in pairs:
        before, after = old.get("components"), new.get("components")
        if isinstance(before, dict) and isinstance(after, dict):
            phase = "prefill" if new["n_prompt"] else "decode"
            yield f"### {phase}, {new['test']}: one pass, profiled"
            yield from component_tables(before, after)


Report = dict[str, Any]

KIND = "bottlenecks"
# Reports can be compared if these fields are equal.
SAME = {
    "model": ("architecture", "parameters", "layers", "width", "vocabulary"),
    "machine": ("processor", "cores"),
    "settings": ("n_prompt", "n_gen", "depth"),
}


def read_report(path: Path) -> Report:
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
    """Yield the role and the measured milliseconds (median and quartiles) of every operation.

    Raise FormatError if the operations of a phase are not a list, or an operation has no role.
    """
    for name, phase in report["phases"].items():
        ops = phase.get("operations") if isinstance(phase, dict) else None
        if not isinstance(ops, list) or not all(isinstance(op, dict) and isinstance(op.get("role"), str) for op in ops):
            raise _error(path, f"operations of {name} = {ops!r}"[:80])
        for op in ops:
            yield op["role"], op.get("measured_ms")


def _error(path: Path, found: str) -> FormatError:
    hint = "name the report.json that an earlier `report` wrote"
    return FormatError(where=str(path), expected="a bottleneck report", found=found, hint=hint)


# Fields that may differ in comparable reports; `section` lists the differences.
CHANGED = {
    "model": ("format", "sha256", "linears_quantised", "weight_bytes"),
    "backend": ("name", "device", "threads", "activations", "kv_type"),
    "settings": ("quant", "quant_min_dim", "quant_layers"),
    "machine": ("system",),
}
# An operation is left out if its time in both reports is less than this share of the time of all operations in the new
# report.
SMALL = 0.005


def differences(old: Report, new: Report, names: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the fields that differ, as "layers 12 -> 26". `names` maps each part of a report to its fields."""
    pairs = [(name, old[part].get(name), new[part].get(name)) for part, keys in names.items() for name in keys]
    pairs = [(name, printable(str(before)), printable(str(after))) for name, before, after in pairs if before != after]
    return [f"{name.replace('_', ' ')} {before[:40]} -> {after[:40]}" for name, before, after in pairs]


def refuse(old: Report, new: Report) -> None:
    """Raise OptionError if the models, machines or passes of two reports differ."""
    other = differences(old, new, SAME)
    if other:
        changes = ", ".join(other)[:200]
        message = f"--against: the reports differ ({changes}); --anyway compares them nevertheless"
        raise OptionError(
            option="--against", expected="the same model, machine and passes", found=changes, message=message
        )


def section(old: Report, new: Report) -> str:
    """Return the comparison of two reports as Markdown."""
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
    """Return a line with old and new medians, the speedup factor and a note."""
    before, after = old["median"], new["median"]
    overlap = old["q1"] <= new["q3"] and new["q1"] <= old["q3"]
    note = "within the spread" if overlap else "slower" if after > before else ""
    return change(title, before, after, note)
