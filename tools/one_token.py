"""Count the files and functions of `mlx_engine` and `kernels` that one greedy decode step calls.

    python -m tools.one_token [--model builtin] [--backend parallel] [-v]

The step is a call of `next(stream)` after the first token. `-v` lists the functions by file, in the order of their
first calls. Compiled kernels are not Python functions, so they are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT, FOLDERS = Path(__file__).resolve().parent.parent, ("mlx_engine", "kernels")


def entered(model: str, backend: str) -> Counter[tuple[str, str]]:
    """Return how often the step calls each function, by file and name."""
    import mlx_engine

    stream = mlx_engine.load(model, backend).stream("Once upon a time", max_tokens=8)
    next(stream)
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
            found[str(path.relative_to(ROOT)), frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        next(stream)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    """Print the counts, and with `-v` the functions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--backend", default="parallel")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    found = entered(given.model, given.backend)
    files = dict.fromkeys(file for file, _ in found)
    for file in files if given.verbose else ():
        print(file)
        for (where, name), n in found.items():
            if where == file:
                print(f"    {name}  {n}")
    print(f"{len(files)} files, {len(found)} functions, {sum(found.values())} calls")


if __name__ == "__main__":
    main()
