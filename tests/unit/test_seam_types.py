"""Models, cache and decode pass arrays on and never read their contents: mypy refuses code that does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPET = """
from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Linear

def above_the_seam(be: Backend, x: Array, head: Linear) -> None:
    y = be.add(be.linear(x, head), x)
    (token,) = be.choose(y, [])
    chosen: int = be.token_id(token)
    {code}
"""


def mypy(folder: Path, code: str) -> str:
    file = folder / "snippet.py"
    file.write_text(SNIPPET.format(code=code))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", folder / "cache", file]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all snippets: mypy reads its own cache from the second on."""
    return tmp_path_factory.mktemp("mypy")


def test_operations_take_and_return_opaque_arrays(folder: Path):
    assert "Success" in mypy(folder, "be.begin(token); be.wait([x, y])")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("y.shape", "[attr-defined]"),
        ("y[0]", "[index]"),
        ("y + x", "[operator]"),
        ("len(y)", "[arg-type]"),
        ("token + 1", "[operator]"),
        ("int(token)", "[arg-type]"),
        ("be.silu([[1.0]])", "[arg-type]"),
    ],
)
def test_code_above_the_seam_cannot_look_inside(folder: Path, code: str, error: str):
    found = mypy(folder, code)
    assert "Found 1 error" in found
    assert error in found
