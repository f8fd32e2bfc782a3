"""Choose the fastest launch settings of Metal kernels: rows per lane, and SIMD-groups per threadgroup.

These two numbers are called a tuning. Tunings are measured once per chip, kernel, matrix type and matrix shape, before
the first launch of the kernel, and kept in a file. Results are bit-identical for every tuning. The number of
SIMD-groups that share a row is not tuned: `k_split` (`kernels/metal/rows.py`) computes it from the shape.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_engine.kernels import metal
from mlx_engine.kernels.files import draft
from mlx_engine.kernels.launch import ExecutorName
from mlx_engine.kernels.metal.formats import LAYOUT_Q8_0 as Q8_0
from mlx_engine.kernels.metal.layout import StoredMatrix
from mlx_engine.kernels.metal.rows import TUNINGS, Tuning, default_tuning, k_split
from mlx_engine.observe.log import LOGGER

# While tunings are measured, successive launches read different copies of a matrix. The copies have this many bytes in
# total, more than a GPU's caches, so every launch reads its copy from memory.
COLD_BYTES = 256 << 20
ROUNDS = 5
# The share by which a tuning must be faster than the default tuning; smaller differences count as noise.
MARGIN = 0.02


def fastest(samples: Mapping[Tuning, Sequence[float]], default: Tuning) -> Tuning:
    """Return the tuning with the smallest median time; the default if none is faster by more than `MARGIN`."""
    medians = {tuning: statistics.median(seconds) for tuning, seconds in samples.items()}
    best = min(medians, key=lambda tuning: medians[tuning], default=default)
    if default in medians and medians[default] * (1 - MARGIN) <= medians[best]:
        return default
    return best


def measured(kernel: Callable[..., Any], args: tuple[Any, ...], tunings: Sequence[Tuning]) -> dict[Tuning, list[float]]:
    """Return `ROUNDS` timings for each tuning that the GPU accepts, in seconds per launch with uncached weights.

    If a launch's output is at least as wide as the kernel's input, the next launch reads the output, as in a model. So
    the two launches cannot overlap.
    """
    sets = cold_sets(args)
    samples: dict[Tuning, list[float]] = {}
    for tuning in tunings:
        try:
            mx.eval(kernel(*sets[0], tuning=tuning))
        except (RuntimeError, ValueError) as error:  # too many threads for the registers that the kernel uses
            LOGGER.log(logging.DEBUG, "%s %s: %s", kernel.__name__, tuning, error)
            continue
        samples[tuning] = []
    for _ in range(ROUNDS):
        for tuning, seconds in samples.items():
            y = None
            for one in sets:
                y = kernel(*following(one, y), tuning=tuning)
            start = time.perf_counter()
            mx.eval(y)
            seconds.append((time.perf_counter() - start) / len(sets))
    del sets
    mx.clear_cache()
    return samples


def cold_sets(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return `args` and copies of it, whose matrices have at least `COLD_BYTES` in total. Only matrices are copied."""
    nbytes = sum(a.nbytes for a in args if isinstance(a, StoredMatrix))
    sets = [args]
    for _ in range(-(-COLD_BYTES // nbytes) - 1):
        copied = tuple(_copy(a) if isinstance(a, StoredMatrix) else a for a in args)
        mx.eval([[a.wq, a.ws] for a in copied if isinstance(a, StoredMatrix)])
        sets.append(copied)
    return sets


def following(args: tuple[Any, ...], before: Any) -> tuple[Any, ...]:
    """Return `args`, with a slice of `before` in place of each vector that is at most as wide as `before`.

    `before` is the output of the previous launch (the first output if it is a tuple), or None.
    """
    y = before[0] if isinstance(before, tuple) else before
    if y is None:
        return args
    return tuple(
        y[:, : a.shape[1]] if isinstance(a, mx.array) and a.ndim == 2 and a.shape[1] <= y.shape[1] else a for a in args
    )


def _copy(matrix: StoredMatrix) -> StoredMatrix:
    return StoredMatrix(matrix.layout, mx.array(matrix.wq) + 0, mx.array(matrix.ws) + 0)


VARIABLE = "MLX_ENGINE_TUNING"
# The fewest bytes of matrices for which tunings are measured: for smaller ones, launch overhead hides differences.
SMALLEST = 1 << 20

# The names of the kernels in which several SIMD-groups may share a row.
SPLIT = ("matvec", "project_add")


def candidates(split: int) -> list[Tuning]:
    """Return the tunings whose `simdgroups` is a multiple of `split`, the number of SIMD-groups that share a row."""
    return [tuning for tuning in TUNINGS if tuning.simdgroups % split == 0]


class Tuner:
    """Tunings of one chip. They are read from a file; a tuning that the file does not have is measured.

    Entries of the file with another `identity` (chip, versions) are ignored. If the file cannot be read or written,
    every process measures the tunings again.
    """

    def __init__(self, identity: str, file: Path) -> None:
        self.identity, self.file = identity, file
        self._announced = False

    def choose(self, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Tuning | None:
        """Return a kernel's tuning; None for several vectors or small matrices, which use the default tuning."""
        weights = [a for a in args if isinstance(a, StoredMatrix)]
        n_vectors = next(len(a) for a in args if isinstance(a, mx.array))
        if n_vectors > 1 or sum(w.nbytes for w in weights) < SMALLEST:
            return None
        name = kernel.__name__
        shape = " + ".join(map(_described, weights))
        split = k_split(*weights[0].shape) if name in SPLIT else 1
        known = self.remembered(f"{name} {shape}")
        for tuning in candidates(split):
            if tuning == known:
                return tuning  # not `known`: the file may have 2.0 in place of 2
        if not self._announced:
            self._announced = True
            LOGGER.log(logging.WARNING, "measuring the fastest settings for this GPU, once; kept in %s", self.file)
        default = default_tuning(sum(w.shape[0] for w in weights), 1)
        samples = measured(kernel, args, candidates(split))
        if not samples:  # the GPU refuses every tuning: do not store the default
            return default
        chosen = fastest(samples, default)
        LOGGER.log(
            logging.WARNING, "  %s %s: %d rows per lane, %d SIMD-groups", name, shape, chosen.rows, chosen.simdgroups
        )
        self.remember(f"{name} {shape}", chosen)
        return chosen

    def remembered(self, key: str) -> Tuning | None:
        """Return the tuning that the file has for a key, or None if the tuning is missing or invalid."""
        try:
            rows, simdgroups = self._read()[self.identity][key]
            return Tuning(rows, simdgroups)
        except (KeyError, TypeError, ValueError):
            return None

    def remember(self, key: str, tuning: Tuning) -> None:
        """Add a tuning to the file. The file is replaced atomically, because other processes may write it too."""
        content = self._read()
        mine = content.get(self.identity)
        content[self.identity] = {**(mine if isinstance(mine, dict) else {}), key: [tuning.rows, tuning.simdgroups]}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with draft(self.file) as part:
                part.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
                part.replace(self.file)
        except OSError as error:
            LOGGER.log(logging.INFO, "%s: cannot be written: %s", self.file, error)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def tuner(executor: ExecutorName) -> Tuner | None:
    """Return the tuner of this machine's GPU; None for the emulator, or if tuning is off."""
    if executor == "emulator" or os.environ.get(VARIABLE) == "off":
        return None
    # Without a home folder, `Path.expanduser` would raise an error.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    chip = str(mx.device_info().get("device_name"))
    return Tuner(identity(executor, chip), Path(cache) / "mlx_engine" / "tuning.json")


def identity(executor: ExecutorName, chip: str) -> str:
    """Return a name for everything that timings depend on: chip, executor, MLX version and kernel source."""
    texts = sorted(Path(metal.__file__).parent.glob("*.metal"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in texts)).hexdigest()[:16]
    return f"{chip}, {executor}, MLX {version('mlx')}, kernels {digest}"


def _described(matrix: StoredMatrix) -> str:
    """Return a matrix's type and shape, for a key in the file; for Q8_0 only the shape, as in older versions."""
    shape = "{} x {}".format(*matrix.shape)
    return shape if matrix.layout == Q8_0 else f"{matrix.layout.name} {shape}"
