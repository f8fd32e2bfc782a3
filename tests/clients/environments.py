"""An environment for each client: the newest versions of its packages, apart from those of the engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

JS = Path(__file__).parent / "js"


def python(folder: Path, packages: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with these packages, which is made if it is not there."""
    program = folder / "bin" / "python"
    if not program.exists():
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(program), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return program


def node(folder: Path) -> Path:
    """Return a Node that finds the packages of js/package.json and a copy of the scripts beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(JS, folder, dirs_exist_ok=True)
    program = folder / "node_modules" / ".bin" / "node"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("npm: expected a program of this name, found none; install Node, or name other clients")
        _run(npm, "install", "--no-audit", "--no-fund", "--no-package-lock", cwd=folder)
    return program


def _run(*command: str, cwd: Path | None = None) -> None:
    # The environment of the tests may point Python to another checkout.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
