"""The server on the lowest versions that pyproject.toml allows: its own tests, with these in place of the newest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = ("starlette", "uvicorn", "h11", "anyio", "msgspec")
TESTS = ("test_chat", "test_completions", "test_connections", "test_disconnect", "test_errors", "test_faults",
         "test_openai_client", "test_origins", "test_page_of_server")  # fmt: skip
VERSIONS = f"from importlib.metadata import version; print(*(version(name) for name in {SERVER}))"


def minima() -> dict[str, str]:
    """Return the lowest version of each package of the server."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.split("\ndependencies = [\n")[1].split("\n]\n")[0]
    return {name: found for name, found in re.findall(r'"([a-z0-9_]+)>=([0-9.]+)"', listed) if name in SERVER}


def test_what_the_server_imports_is_declared():
    imported = set()
    for file in (ROOT / "mlx_engine" / "serve").glob("*.py"):
        imported |= set(re.findall(r"^(?:from|import) (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE))
    others = imported - set(sys.stdlib_module_names) - {"mlx_engine", "numpy", "typer"}
    assert others == set(SERVER) == set(minima())


@pytest.mark.slow
def test_the_server_runs_on_its_minimum_versions(tmp_path: Path):
    pinned = [f"{name}=={version}" for name, version in minima().items()]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), *pinned]
    made = subprocess.run(install, capture_output=True, text=True, check=False)
    if re.search("connection|resolve host|timed out", made.stderr, flags=re.IGNORECASE):
        pytest.skip("pip cannot reach its index")
    assert made.returncode == 0, made.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", VERSIONS], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    versions = dict(zip(SERVER, found.stdout.split(), strict=True))
    assert all(f"{versions[name]}.".startswith(f"{version}.") for name, version in minima().items()), versions
    files = [str(ROOT / "tests" / "serve" / f"{name}.py") for name in TESTS]
    # The plugin of an older anyio may not suit pytest; and slow readers are slow by the clock.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:anyio", "-k", "not slow_reader", *files]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
