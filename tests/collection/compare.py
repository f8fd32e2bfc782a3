"""How much two results differ."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


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
    same = (x == y) | np.isnan(y)
    scale = np.abs(y[np.isfinite(y)]).max(initial=0.0) or 1.0
    return float(np.abs(x[~same] - y[~same]).max(initial=0.0) / scale)


def values(array: Any) -> Any:
    """Return an array of MLX or NumPy as float64, or as complex numbers."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
