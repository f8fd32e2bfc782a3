"""Append the rows of a benchmark to its file of results, with the origin of the measurement in each row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlx_engine.bench.origin import origin

Row = dict[str, Any]

FOLDER = Path(__file__).parent / "results"


class Log:
    """Rows of one benchmark, appended to a file.

    The project's own results, `benchmarks/results/`, take only rows that were measured at a commit. If tracked files
    have changed, or there is no git checkout, nothing is written, and a warning goes to stderr before the measurement.
    Other files get all rows.

    Attributes:
        common: machine, versions and commit, which every row records.
    """

    def __init__(self, benchmark: str, path: Path | None) -> None:
        self.common: Row = dict(origin())
        self.path = path
        commit = self.common["commit"]
        if path is not None and path.resolve().parent == FOLDER and (commit is None or commit.endswith("+")):
            reason = "this is no git checkout" if commit is None else "files have changed since the commit (git status)"
            print(f"{benchmark}: {reason}, so these figures are printed and not kept in {path.name}", file=sys.stderr)
            self.path = None

    def append(self, row: Row) -> Row:
        """Write a row if rows are kept; return it with the common fields of all rows."""
        row = {**self.common, **row}
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps(row) + "\n")
        return row
