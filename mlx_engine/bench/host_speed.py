"""What a host like this machine offers to a rank: its memory bandwidth, and the arithmetic of its products."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

# A product of a chunk of a prompt with a matrix of a usual size: some milliseconds on two cores.
ROWS, SIDE = 512, 2048
READINGS = 5


def product_rate(backend: Backend, type_: GGMLType, rows: int = ROWS, side: int = SIDE) -> float:
    """Return the floating-point operations per second of products with a matrix of this type, the best of a few.

    The matrix is (side, side) and multiplied with `rows` rows.
    """
    weight = Weight("speed", (side, side), type_, np.zeros(type_.bytes_for(side * side), np.uint8))
    rates = []
    with backend.session():
        linear = Linear("speed", backend.prepare(weight))
        x: Any = backend.array(np.ones((rows, side), np.float32))
        for _ in range(READINGS + 1):  # the first one warms up
            start = time.perf_counter()
            backend.wait(backend.linear(x, linear))
            rates.append(2.0 * rows * side * side / (time.perf_counter() - start))
    return max(rates[1:])
