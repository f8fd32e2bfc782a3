"""The judge: what it means that a backend's result is right."""

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
from mlx_engine.backends.scalar import ScalarBackend
from tests.contract.cases import OpCase

# From the registry, so that a new backend cannot be forgotten here; and those with compiled kernels without them, and
# `metal` in the emulator. Threads are more than cores: they shall get in each other's way.
PLAIN, EMULATED = " --no-jit", "metal, emulated"
THREADS = 3
NAMES = [name for name in backend_names() if unavailable(name) is None]
BACKENDS = NAMES + [name + PLAIN for name in NAMES if name in ("simd", "parallel")]
if emulator.unavailable() is None:
    BACKENDS.append(EMULATED)


@contextmanager
def named(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A backend's own name and how it is made, while this machine is what that needs."""
    if name == EMULATED:
        from tests.emulated import compile_together

        compile_together()
    with mock.patch.dict(os.environ, {VARIABLE: "emulate"} if name == EMULATED else {}):
        plain = name.removesuffix(PLAIN).partition(",")[0]
        yield plain, {"jit": not name.endswith(PLAIN), "threads": THREADS}


def load(name: str, source: str | Path) -> mlx_engine.Engine:
    """An engine on that backend."""
    with named(name) as (plain, settings):
        return mlx_engine.load(source, plain, **settings)


# Below the smallest normal float32 a relative error means nothing.
SMALLEST = 1e-37


@cache
def backend(name: str) -> Backend:
    with named(name) as (plain, settings):
        return create_backend(plain, **settings)


@cache
def expected(case: OpCase) -> list[np.ndarray]:
    """What `scalar`, the definition, says."""
    return case.on(ScalarBackend())


def check(be: Backend, case: OpCase) -> None:
    """Every result of the case is right."""
    for want, got in zip(expected(case), case.on(be), strict=True):
        judge(case, want, got)


def judge(case: OpCase, want: np.ndarray, got: np.ndarray) -> None:
    """Shape, dtype, no NaN, and three bounds on the error."""
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
