"""What the GPU kernels reach on this machine, and a model with them: a table, and one file to send to others.

No Mac takes part in the development of this project. What only a Mac can tell comes from people who run
`kernels bench --report` and send what it writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.bench import mlx_lm_peer
from mlx_engine.bench.cells import Test
from mlx_engine.bench.files import write
from mlx_engine.bench.run import origin, rows
from mlx_engine.bench.tables import aligned, markdown
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import SHAPES
from mlx_engine.checkpoint.sources import PREFIX, resolve
from mlx_engine.errors import SourceError
from mlx_engine.models import model_file

if TYPE_CHECKING:
    from kernels.launch import ExecutorName

Row = dict[str, Any]
SCHEMA = 1

# Sizes that say which matrices a model has.
SIZES = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
# What a model is timed on: a prompt, and a text.
TESTS = (Test(n_prompt=512), Test(n_gen=64))
REPETITIONS = 5
# What is timed beside the kernels: MLX alone, and our kernels by the executor that ran them.
BACKENDS = {"metal": ("mlx", "metal"), "cuda": ("mlx", "cuda"), "emulator": ("mlx", "metal")}


def measure(
    model: str, executor: ExecutorName, *, vectors: int = 1, progress: Callable[[int, int], None] | None = None
) -> Row:
    """Every rung of the ladder on a model's matrices, and the machine.

    Raises:
        SourceError: there is no such model.
    """
    from kernels.lab import chips
    from kernels.lab.ladder import Product, climb, products

    every: list[Product] = products(**model_sizes(model))
    found: Row = {
        "schema": SCHEMA,
        **origin(),
        "model": model if model.startswith(PREFIX) else Path(model).name,  # a path may tell who sends it
        "executor": executor,
        "chip": chips.chip(),
        "nominal_gbs": chips.nominal_gbs(),
        "read_gbs": None if executor == "emulator" else chips.read_gbs(executor),
        "ladder": [],
    }
    for i, product in enumerate(every):
        found["ladder"] += climb([product], executor, vectors)
        if progress is not None:
            progress(i + 1, len(every))
    return found


def model_sizes(model: str) -> dict[str, int]:
    """Those of `SIZES`; of a shape without writing its file."""
    shape = SHAPES.get(model.removeprefix(PREFIX)) if model.startswith(PREFIX) else None
    if shape is None:
        checkpoint = open_checkpoint(resolve(model))
        shape = model_file(checkpoint).plan(checkpoint).config
    return {name: getattr(shape, name) for name in SIZES}


def add_models(
    found: Row,
    model: str,
    *,
    budget: float | None = None,
) -> None:
    """Tokens per second of the model on MLX's own operations, with our kernels, and in mlx-lm."""
    names = BACKENDS[found["executor"]]
    found["tokens"] = list(rows(model, names, TESTS, repetitions=REPETITIONS, budget=budget))
    found["mlx_lm"] = mlx_lm_peer.rates(resolve(model), TESTS, repetitions=REPETITIONS)


def default_file() -> Path:
    """`kernels-CHIP.md` in the current folder."""
    from kernels.lab import chips

    return Path("kernels-" + re.sub(r"[^a-z0-9]+", "-", chips.chip().lower()).strip("-") + ".md")


def check_file(path: Path) -> None:
    """Before anything is measured for nothing.

    Raises:
        SourceError: it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_report(path: Path, found: Row) -> None:
    """JSON alone where the name says so; else a page for people, with the JSON at its end.

    Raises:
        SourceError: it cannot be written.
    """
    every = json.dumps(found, indent=1)
    write(path, every + "\n" if path.suffix == ".json" else f"{page(found)}\n```json\n{every}\n```\n")


def page(found: Row) -> str:
    """The whole report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = ["# Kernels on " + found["chip"], "", f"{system(found)}; {versions}; {found['time']}", "", summary(found)]
    if "tokens" in found:
        parts += ["", f"## Tokens per second: {found['model']}", "", markdown(found["tokens"])]
        parts += ["", mlx_lm_line(found["mlx_lm"])]
    return "\n".join([*parts, "", "## Every number", ""])


def system(found: Row) -> str:
    """Operating system and processor."""
    machine = found["machine"]
    return ", ".join(str(machine[name]) for name in ("system", "processor") if machine.get(name))


def summary(found: Row) -> str:
    """The ladder as a table: rates on a GPU, counts in the emulator."""
    table = _counts(found["ladder"]) if found["executor"] == "emulator" else _rates(found)
    if found["executor"] == "emulator":
        return table + "\n\nCounted in the emulator: nothing here says how fast a GPU is."
    paper = "" if found["nominal_gbs"] is None else f"; {found['nominal_gbs']:g} GB/s on paper"
    return (
        f"{table}\n\nA plain read reaches {found['read_gbs']:.1f} GB/s here{paper}. Weights are cold in every launch."
    )


def _rates(found: Row) -> str:
    cells = [["product", "N x K", "kernel", "R", "NSG", "KS", "us", "GB/s", "of a read"]]
    for row in found["ladder"]:
        own = [f"{row['seconds'] * 1e6:.1f}", f"{row['gbs']:.1f}", f"{row['gbs'] / found['read_gbs']:.0%}"]
        cells.append([*_names(row), *(str(row.get(name, "-")) for name in ("R", "NSG", "KS")), *own])
    return aligned(cells)


def _counts(ladder: Sequence[Row]) -> str:
    cells = [["product", "N x K", "kernel", "threads", "SIMD operations", "barriers", "bytes per weight"]]
    for row in ladder:
        counts = [f"{row['counts'][name]:,}" for name in ("threads", "simd_operations", "barriers")]
        cells.append([*_names(row), *counts, f"{row['nbytes'] / sum(row['rows']) / row['columns']:.3f}"])
    return aligned(cells)


def _names(row: Row) -> list[str]:
    return [row["product"], f"{'+'.join(map(str, row['rows']))} x {row['columns']}", row["kernel"]]


def mlx_lm_line(peer: Row) -> str:
    """mlx-lm's rates, or why there are none."""
    if peer.get("unavailable"):
        return f"mlx-lm: {peer['unavailable']}"
    rates = ", ".join(f"{name} {rate:.1f} t/s" for name, rate in peer["rates"].items())
    return f"mlx-lm {peer['version']} ({peer['weights']}): {rates}"
