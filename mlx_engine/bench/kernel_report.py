"""Measure the GPU kernels on a model's matrices: a table for the terminal, and a report file to share.

Measurements on Apple GPUs come from users, who run `kernels bench --report` and share the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from itertools import product as pairs
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.bench.origin import origin
from mlx_engine.bench.run import rows
from mlx_engine.bench.samples import Test
from mlx_engine.bench.tables import Row, aligned, markdown, write
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import SHAPES
from mlx_engine.checkpoint.sources import PREFIX, resolve
from mlx_engine.errors import SourceError
from mlx_engine.weights.model import architecture_of

if TYPE_CHECKING:
    from mlx_engine.kernels.launch import ExecutorName

SCHEMA = 1
# The sizes that determine a model's matrices.
SIZES = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
# The tests of a model: prefill and decode.
TESTS = (Test(n_prompt=512), Test(n_gen=64))
REPETITIONS = 5
# The 16-bit types of activations. With these, the environment variable MLX_ENGINE_TENSORS selects the kernel for the
# products of prompts. WAYS maps each value of the variable to the Metal operation that the kernel uses.
ROUNDED = ("f16", "bf16")
WAYS = {"on": "matmul2d", "off": "simdgroup_matrix"}
# Maps each executor to the two backends to time: MLX alone, and MLX with this project's kernels.
BACKENDS = {"metal": ("mlx", "metal"), "cuda": ("mlx", "cuda"), "emulator": ("mlx", "metal")}


def measure(
    model: str, executor: ExecutorName, *, vectors: int = 1, progress: Callable[[int, int], None] | None = None
) -> Row:
    """Measure the ladder on a model's matrices, with `vectors` input vectors per product.

    The ladder is a list of kernels for the same product, from slow to fast (`kernels/lab/ladder.py`).

    Raises:
        SourceError: there is no such model.
    """
    from mlx_engine.kernels.lab import bench
    from mlx_engine.kernels.lab.ladder import Product, climb, products

    every: list[Product] = products(**model_sizes(model))
    found: Row = {
        "schema": SCHEMA,
        **origin(),
        "model": model if model.startswith(PREFIX) else Path(model).name,  # a path may contain the user's name
        "executor": executor,
        "chip": bench.chip(),
        "nominal_gbs": bench.nominal_gbs(),
        "read_gbs": None if executor == "emulator" else bench.read_gbs(executor),
        "ladder": [],
    }
    for i, product in enumerate(every):
        found["ladder"] += climb([product], executor, vectors)
        if progress is not None:
            progress(i + 1, len(every))
    return found


def model_sizes(model: str) -> dict[str, int]:
    """Return a model's `SIZES`. For a model `shape:NAME`, take them from a table instead of generating a model file."""
    shape = SHAPES.get(model.removeprefix(PREFIX)) if model.startswith(PREFIX) else None
    if shape is None:
        checkpoint = open_checkpoint(resolve(model))
        shape = architecture_of(checkpoint).plan(checkpoint).config
    return {name: getattr(shape, name) for name in SIZES}


def add_prompts(found: Row, model: str) -> None:
    """Add times of a prompt's products and attention with our kernels and MLX's; in the emulator, operation counts."""
    from mlx_engine.kernels.lab.ladder import climb_attention, climb_prompts, products
    from mlx_engine.kernels.metal.prompt_product_tensors import has_accelerators

    sizes, executor = model_sizes(model), found["executor"]
    heads = {name: sizes[name] for name in ("n_heads", "n_kv_heads", "head_dim")}
    found["accelerators"] = has_accelerators()
    found["prompts"] = list(climb_prompts(products(**sizes), executor))
    found["attention"] = list(climb_attention(**heads, executor=executor))


def add_models(
    found: Row,
    model: str,
    *,
    budget: float | None = None,
) -> None:
    """Add the model's tokens per second on the backend `mlx`, and on the backend with this project's kernels.

    The activations are float32 and, with the executor `metal`, also each 16-bit type. Call `add_prompts` first, because
    it finds out whether the GPU has neural accelerators. If so, the backend `metal` is measured with both operations of
    `WAYS` for each 16-bit type.
    """
    names, executor = BACKENDS[found["executor"]], found["executor"]
    found["tokens"] = list(rows(model, names, TESTS, repetitions=REPETITIONS, budget=budget))
    if executor != "metal":
        return
    ways = ("on", "off") if found["accelerators"] else ("off",)
    for activations, tensors in pairs(ROUNDED, ways):
        how: dict[str, Any] = {"activations": activations, "shared": {"tensors": tensors}}
        with _tensors(tensors):
            of = names if tensors == "off" else ("metal",)
            found["tokens"] += rows(model, of, TESTS, repetitions=REPETITIONS, budget=budget, **how)


@contextmanager
def _tensors(chosen: str) -> Iterator[None]:
    """Select the prompt kernel of all engines that are loaded inside this context; `chosen` is a key of WAYS."""
    from mlx_engine.backends.metal.rounded import VARIABLE

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = chosen
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def default_file() -> Path:
    """Return `kernels-CHIP.md` in the current folder."""
    from mlx_engine.kernels.lab import bench

    return Path("kernels-" + re.sub(r"[^a-z0-9]+", "-", bench.chip().lower()).strip("-") + ".md")


def check_file(path: Path) -> None:
    """Raise SourceError if the file cannot be written. Call this first, so that no measurement is lost."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise SourceError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_report(path: Path, found: Row) -> None:
    """Write the report: JSON if the suffix is .json, else Markdown with the JSON at its end.

    Raise SourceError if the file cannot be written.
    """
    every = json.dumps(found, indent=1)
    write(path, every + "\n" if path.suffix == ".json" else f"{page(found)}\n```json\n{every}\n```\n")


def page(found: Row) -> str:
    """Return the report as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = ["# Kernels on " + found["chip"], "", f"{system(found)}; {versions}; {found['time']}", "", summary(found)]
    for (activations, tensors), ours in _by_type(found.get("tokens", ())):
        way = f", activations {activations}, prompts by {WAYS[tensors]}" if tensors else ""
        parts += ["", f"## Tokens per second: {found['model']}{way}", "", markdown(ours)]
    return "\n".join([*parts, "", "## Every number", ""])


def system(found: Row) -> str:
    """Return operating system and processor."""
    machine = found["machine"]
    return ", ".join(str(machine[name]) for name in ("system", "processor") if machine.get(name))


def summary(found: Row) -> str:
    """Return the tables of the ladder and, if measured, of a prompt: times, or operation counts in the emulator."""
    table = _counts(found["ladder"]) if found["executor"] == "emulator" else _rates(found)
    if found["executor"] == "emulator":
        prompts = f"\n\nA prompt:\n\n{_counts(found['prompts'])}" if "prompts" in found else ""
        return f"{table}{prompts}\n\nCounted in the emulator: these are not GPU timings."
    paper = "" if found["nominal_gbs"] is None else f"; {found['nominal_gbs']:g} GB/s nominal"
    return (
        f"{table}\n\nA plain read reaches {found['read_gbs']:.1f} GB/s here{paper}. Weights are cold in every launch."
        + (f"\n\n{_prompts(found)}" if "prompts" in found else "")
    )


def _rates(found: Row) -> str:
    # R: rows per lane; NSG: SIMD-groups per threadgroup; KS: SIMD-groups per row.
    cells = [["product", "N x K", "kernel", "R", "NSG", "KS", "us", "GB/s", "of a read"]]
    for row in found["ladder"]:
        own = [f"{row['seconds'] * 1e6:.1f}", f"{row['gbs']:.1f}", f"{row['gbs'] / found['read_gbs']:.0%}"]
        cells.append([*_names(row), *(str(row.get(name, "-")) for name in ("R", "NSG", "KS")), *own])
    return aligned(cells)


def _prompts(found: Row) -> str:
    """Return the products and the attention of a prompt as tables."""
    cells = [["product", "N x K", "kernel", "weights", "activations", "us", "TFLOP/s"]]
    for row in found["prompts"]:
        own = ["refused", "-"] if "refused" in row else [f"{row['seconds'] * 1e6:.1f}", f"{row['tflops']:.2f}"]
        cells.append([*_names(row), row["type"], row["activations"], *own])
    heads = [["attention", "activations", "us"]]
    heads += [[row["kernel"], row["activations"], f"{row['seconds'] * 1e6:.1f}"] for row in found["attention"]]
    has = "has" if found["accelerators"] else "has no"
    return (
        f"By MLX's rule (macOS version and GPU architecture), this GPU {has} accelerators for `matmul2d`. Products and "
        f"attention of a prompt of {found['prompts'][0]['vectors']} tokens:\n\n"
        f"{aligned(cells)}\n\n{aligned(heads)}"
    )


def _by_type(tokens: Sequence[Row]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Yield ((type of activations, key of WAYS), rows) for each combination; with float32, "" in place of the key."""
    for key, ours in groupby(tokens, lambda row: (str(row.get("activations")), str(row.get("tensors", "")))):
        yield key, list(ours)


def _counts(ladder: Sequence[Row]) -> str:
    cells = [["product", "N x K", "kernel", "threads", "SIMD operations", "barriers", "bytes per weight"]]
    for row in ladder:
        counts = [f"{row['counts'][name]:,}" for name in ("threads", "simd_operations", "barriers")]
        cells.append([*_names(row), *counts, f"{row['nbytes'] / sum(row['rows']) / row['columns']:.3f}"])
    return aligned(cells)


def _names(row: Row) -> list[str]:
    return [row["product"], f"{'+'.join(map(str, row['rows']))} x {row['columns']}", row["kernel"]]
