"""The programs of docs/research.md print what the page shows. `python -m tests.unit.test_research_page` writes it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "research.md"
# A program, and what it prints, if it prints something.
PROGRAM = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def programs(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Run all programs of the page in their order; yield each with what it has printed."""
    names: dict[str, Any] = {}
    for program in PROGRAM.finditer(text):
        # The bits of this backend are the same on every processor.
        code = program[1].replace('mlx_engine.load("builtin"', 'mlx_engine.load("builtin", backend="simd"')
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        yield program, out.getvalue()
    names["engine"].close()


def test_every_program_prints_what_the_page_shows() -> None:
    found = [(program[2] or "", printed) for program, printed in programs(PAGE.read_text(encoding="utf-8"))]
    assert len(found) >= 12
    for shown, printed in found:
        assert printed == shown


def rewritten(text: str) -> str:
    """Return the page with what the programs print."""
    parts, end = [], 0
    for program, printed in programs(text):
        shown = f"\n```text\n{printed}```\n" if printed else ""
        parts += [text[end : program.start()], f"```python\n{program[1]}```\n{shown}"]
        end = program.end()
    return "".join([*parts, text[end:]])


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
