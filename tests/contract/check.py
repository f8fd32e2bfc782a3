"""Compare a backend's results with those of `scalar`: shape, dtype, and bounds on the error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import mlx_engine
from kernels import emulator
from mlx_engine.backends import VARIABLE, backend_names, create_backend, unavailable
from mlx_engine.backends.base import Backend
from mlx_engine.backends.numpy.scalar import ScalarBackend
from tests.contract.cases import OpCase

# The names come from the registry, so that no new backend is forgotten here. Backends with compiled kernels are also
# tested without them, and `metal` in the emulator. There are more threads than cores on purpose, so that threads are
# preempted.
PLAIN, EMULATED = " --no-jit", "metal, emulated"
THREADS = 3
NAMES = [name for name in backend_names() if unavailable(name) is None]
BACKENDS = NAMES + [name + PLAIN for name in NAMES if name in ("simd", "parallel")]
if emulator.unavailable() is None:
    BACKENDS.append(EMULATED)


@contextmanager
def named(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the backend's registered name and its keyword arguments, with the environment set that it needs."""
    if name == EMULATED:
        from tests.emulated import compile_together

        compile_together()
    with mock.patch.dict(os.environ, {VARIABLE: "emulate"} if name == EMULATED else {}):
        plain = name.removesuffix(PLAIN).partition(",")[0]
        yield plain, {"jit": not name.endswith(PLAIN), "threads": THREADS}


def load(name: str, source: str | Path) -> mlx_engine.Engine:
    """Load an engine on this backend."""
    with named(name) as (plain, settings):
        return mlx_engine.load(source, plain, **settings)


# Just above the smallest normal float32: relative errors of smaller values have no meaning.
SMALLEST = 1e-37


@cache
def backend(name: str) -> Backend:
    with named(name) as (plain, settings):
        return create_backend(plain, **settings)


@cache
def expected(case: OpCase) -> list[np.ndarray]:
    """Return the results of `scalar`, which defines them."""
    return case.on(ScalarBackend())


def check(be: Backend, case: OpCase) -> None:
    """Assert that every result of the case is correct on this backend."""
    for want, got in zip(expected(case), case.on(be), strict=True):
        judge(case, want, got)


def failure(name: str, case: OpCase) -> str | None:
    """Return what is wrong with the case's results on this backend; None if they are correct."""
    try:
        check(backend(name), case)
    except Exception as error:  # every backend is checked, also after one that raises
        return f"{type(error).__name__}: {error}"
    return None


def judge(case: OpCase, want: np.ndarray, got: np.ndarray) -> None:
    """Assert shape, dtype, finite values, and the case's bounds on the error."""
    assert got.shape == want.shape, f"{case.id}: shape {want.shape} expected, {got.shape} found"
    if want.dtype.kind == "f":
        assert got.dtype == np.float32, f"{case.id}: float32 expected, {got.dtype} found"
    assert np.isfinite(got).all(), f"{case.id}: not finite"
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want, err_msg=case.id)
        return
    error = np.abs(got.astype(np.float64) - want)
    worst = error.max() / max(np.abs(want).max(), SMALLEST)
    assert np.linalg.norm(error) <= case.rtol * np.linalg.norm(want) + SMALLEST, f"{case.id}: {worst:.1e} off"
    assert worst <= case.atol, f"{case.id}: an element is {worst:.1e} of the largest off"
    if case.each is not None:
        assert (error <= case.each * np.abs(want) + SMALLEST).all(), f"{case.id}: an element is relatively off"
