"""Run the cases of one repository in this process, and say of each how it ended."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.emulator import EmulatorError
from kernels.emulator import metal_kernel as emulated
from tests.collection import cases
from tests.collection.case import CASES, Case, Checkout
from tests.collection.repositories import Repository


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        verdict: "right", "differs", the name of the emulator's error, or "error" if the case itself failed.
        kernels: the places in the project that made the kernels that ran: file and line.
        text: the error, or by how much the results differ.
    """

    repository: str
    case: str
    verdict: str
    kernels: list[str] = field(default_factory=list)
    text: str = ""
    bug: str | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether a sound kernel ran and was right, or the bug of another was reported."""
        return self.verdict.endswith("Error") if self.bug else self.verdict == "right"


@contextmanager
def front_door(checkout: Path) -> Iterator[set[str]]:
    """Run calls of `mx.fast.metal_kernel` in the emulator, and collect the places that made the kernels that ran."""
    ran: set[str] = set()
    was = mx.fast.metal_kernel, mx.metal.is_available, mx.default_device, mx.compile

    def make(*words: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        kernel, place = emulated(*words, **options), f"{frame.f_code.co_filename}:{frame.f_lineno}"

        def call(**launch: Any) -> Any:
            ran.add(place.removeprefix(f"{checkout}/"))
            return kernel(**launch, strict=False)

        return call

    mx.fast.metal_kernel, mx.metal.is_available = make, lambda: True
    mx.default_device = lambda: mx.Device(mx.gpu)
    mx.compile = lambda f=None, *a, **k: f if f is not None else lambda g: g
    try:
        yield ran
    finally:
        mx.fast.metal_kernel, mx.metal.is_available, mx.default_device, mx.compile = was


def run_cases(repository: Repository, folder: Path, names: list[str]) -> Iterator[Outcome]:
    """Run the cases of a repository whose names contain one of `names`, or all."""
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    root = (folder / repository.folder).resolve()
    checkout = Checkout(root, repository.root)
    for one in CASES:
        if one.repository == repository.path and (not names or any(name in one.name for name in names)):
            yield outcome(one, checkout, root)


def outcome(one: Case, checkout: Checkout, root: Path) -> Outcome:
    """Run a case and compare its results."""
    start, text, verdict = time.perf_counter(), "", "right"
    with front_door(root) as ran:
        try:
            found, expected = one.run(checkout)
            worst = difference(found, expected)
            if not worst <= one.tolerance:
                verdict, text = "differs", f"by {worst:.1e} of the largest value, allowed {one.tolerance:.0e}"
        except EmulatorError as error:
            verdict, text = type(error).__name__, str(error)
        except Exception as error:
            verdict, text = "error", f"{type(error).__name__}: {error}"
    return Outcome(one.repository, one.name, verdict, sorted(ran), text, one.bug, round(time.perf_counter() - start, 1))


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two trees of arrays, relative to the largest expected value of an array."""
    if isinstance(expected, dict):
        return max(difference(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise ValueError(f"expected {len(expected)} results, found {len(found)}")
        return max(difference(*pair) for pair in zip(found, expected, strict=True))
    x, y = values(found), values(expected)
    if x.shape != y.shape:
        raise ValueError(f"expected shape {y.shape}, found {x.shape}")
    if not np.array_equal(np.isnan(x), np.isnan(y)):
        return float("nan")
    equal = (x == y) | np.isnan(y)
    scale = np.abs(y[np.isfinite(y)]).max(initial=0.0) or 1.0
    return float(np.abs(np.where(equal, 0, x - y)).max(initial=0.0) / scale)


def values(array: Any) -> Any:
    """Return an array of MLX or NumPy as float64, or as complex numbers."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def as_dictionary(one: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON can hold it."""
    return asdict(one)
