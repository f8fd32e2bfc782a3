"""Describe the origin of a measurement: time, versions, commit, model digest."""

from __future__ import annotations

import datetime
import hashlib
import math
import platform
from importlib import metadata
from pathlib import Path

import mlx_engine
from mlx_engine.bench import machine
from mlx_engine.bench.machine import output_of
from mlx_engine.checkpoint.gguf import part_files
from mlx_engine.checkpoint.model_files import Checkpoint

SCHEMA = 1
PACKAGES = ("mlx", "numpy", "numba", "tokenizers")
# What benchmarks write: several of them run in a row on one commit.
WRITTEN = ("benchmarks/results", "benchmarks/reports", "BENCHMARKS.md")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"mlx-engine": mlx_engine.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, followed by "+" if tracked files have changed.

    Results of benchmarks are not counted as changes.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head = output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    apart = [f":(exclude){path}" for path in WRITTEN]
    changed = output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *apart)
    return f"{head}+" if head and changed else head


def digest(path: Path) -> str:
    """Return the SHA-256 of a model file with all its parts, or of a folder's safetensors files in order of names."""
    total = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else part_files(path):
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                total.update(piece)
    return total.hexdigest()


def origin() -> dict[str, object]:
    """Return the time, commit, machine and versions of a measurement."""
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine.machine(),
        "versions": versions(),
    }


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the model's name, bytes and parameters."""
    weights = [checkpoint.weight(name) for name in checkpoint.shapes]
    return {
        "model_name": str(checkpoint.metadata.get("general.name") or checkpoint.architecture),
        "model_size": sum(weight.nbytes for weight in weights),
        "model_n_params": sum(math.prod(weight.shape) for weight in weights),
        **({"notes": list(checkpoint.notes)} if checkpoint.notes else {}),
    }
