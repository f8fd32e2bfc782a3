"""Models, cache and decode pass arrays on and never read their contents: mypy refuses code that does."""

import re
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SNIPPET = """
from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Linear

def above_the_seam(be: Backend, x: Array, head: Linear) -> None:
    y = be.add(be.linear(x, head), x)
    (token,) = be.choose(y, [])
    chosen: int = be.token_id(token)
    be.begin(token); be.wait([x, y])
"""
REFUSED = {
    "y.shape": "[attr-defined]",
    "y[0]": "[index]",
    "y + x": "[operator]",
    "len(y)": "[arg-type]",
    "token + 1": "[operator]",
    "int(token)": "[arg-type]",
    "be.silu([[1.0]])": "[arg-type]",
}


def test_arrays_are_passed_on_and_code_above_the_seam_cannot_look_inside(tmp_path: Path):
    """One run of mypy, which keeps what it has found out about the modules that it reads: they take two seconds."""
    file, first = tmp_path / "snippet.py", SNIPPET.count("\n") + 1
    file.write_text(SNIPPET + "".join(f"    {code}\n" for code in REFUSED))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", ".mypy_cache/seam", file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE).stdout
    errors = re.findall(r":(\d+): error: .* (\[[a-z-]+\])$", found, re.MULTILINE)
    expected = [(str(first + i), error) for i, error in enumerate(REFUSED.values())]
    assert errors == expected, found
