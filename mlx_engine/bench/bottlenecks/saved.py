"""Read a report that `report` wrote to a JSON file, and check its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_engine.errors import FormatError, SourceError, is_number

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
        found = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: expected a readable file, found {error.strerror or error}") from error
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
