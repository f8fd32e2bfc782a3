"""Elementary functions of kernels: within a hair of half a unit in the last place, and the same bits everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import metal_kernel, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

Array = np.ndarray[Any, Any]

# NumPy's functions of float64, whose errors are far below float32's.
OF_ONE: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(10.0, x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
}
OF_TWO: dict[str, Callable[[Array, Array], Array]] = {"pow": np.power, "atan2": np.arctan2}


def evaluated(x: Array, y: Array) -> dict[str, Array]:
    """All functions of all numbers, by one kernel."""
    calls = [f"{name}(x[i])" for name in OF_ONE] + [f"{name}(x[i], y[i])" for name in OF_TWO]
    rows = "".join(f"out[{row} * x_shape[0] + i] = {call};\n" for row, call in enumerate(calls))
    kernel = metal_kernel("functions", ["x", "y"], ["out"], f"const uint i = thread_position_in_grid.x;\n{rows}")
    (out,) = kernel(
        inputs=[x, y],
        output_shapes=[(len(calls), len(x))],
        output_dtypes=[mx.float32],
        grid=(len(x), 1, 1),
        threadgroup=(256, 1, 1),
    )
    return dict(zip([*OF_ONE, *OF_TWO], np.array(out), strict=True))


def floats(count: int, seed: int) -> Array:
    """Bit patterns evenly among all of float32, infinities and NaN too, and numbers up to 2**-6, 1 and 64.

    They are made of integers alone: NumPy's normal deviates are computed with functions of the C library.
    """
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)
    usual = rng.integers(-(2**24), 2**24, count // 2) * 2.0 ** (rng.integers(-1, 2, count // 2) * 6 - 24)
    return np.concatenate([patterns, usual.astype(np.float32)])


def flushed(x: Array) -> Array:
    """Zero for numbers below float32's smallest normal one, as on a GPU."""
    with np.errstate(all="ignore"):
        return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def units(got: Array, want: Array) -> Array:
    """The error in units of the last place of the nearest float32; 0 where both are NaN, or the same infinity."""
    with np.errstate(all="ignore"):
        nearest = want.astype(np.float32)
        error = np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(nearest)).astype(np.float64)
    same = (got == nearest) | (np.isnan(got) & np.isnan(want))
    return np.where(same & ~np.isfinite(got), 0.0, np.where(np.isnan(error), np.inf, error))


@pytest.fixture(scope="module")
def numbers() -> tuple[Array, Array]:
    x, y = floats(1 << 16, 0), floats(1 << 16, 1)
    ends = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, 0.5, 2, -2, 3, 1e30], np.float32)
    first, second = np.meshgrid(ends, ends)
    x[: ends.size**2], y[: ends.size**2] = first.ravel(), second.ravel()
    return x, y


@pytest.fixture(scope="module")
def results(numbers: tuple[Array, Array]) -> dict[str, Array]:
    return evaluated(*numbers)


@pytest.mark.some(5)
@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_functions_are_rounded_to_the_nearest_float(name: str, numbers: tuple[Array, Array], results: dict[str, Array]):
    with np.errstate(all="ignore"):
        x, y = (flushed(value.astype(np.float64)) for value in numbers)
        want = flushed(OF_ONE[name](x) if name in OF_ONE else OF_TWO[name](x, y))
    error = units(results[name], want)
    worst = int(np.argmax(error))
    assert error[worst] < 0.501, (x[worst], y[worst], results[name][worst], want[worst])
    zero = (want == 0) & (results[name] == 0)
    assert np.array_equal(np.signbit(results[name][zero]), np.signbit(want[zero]))


def test_the_bits_do_not_depend_on_the_machine(results: dict[str, Array]):
    """The digest was made once, on one machine. NaN counts as NaN: its sign and payload are the processor's."""
    digest = hashlib.sha256()
    for values in results.values():
        digest.update(np.where(np.isnan(values), np.float32(0), values).tobytes())
        digest.update(np.isnan(values).tobytes())
    assert digest.hexdigest()[:16] == "e63602eb2ec3bce0"
