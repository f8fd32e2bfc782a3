"""One case of the contract suite, and the inputs that cases are built from."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import LayerNorm, Linear, Norm, RMSNorm
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight

Run = Callable[[Backend, np.random.Generator], Any]


@dataclass(frozen=True)
class OpCase:
    """One call of a backend operation: its inputs, and the error that is allowed.

    `run` draws the inputs from the generator, converts them to backend arrays and returns the backend's result.
    `rtol` bounds the relative Frobenius error, `atol` each element's error relative to the largest expected element,
    `each` the relative error of every element. `why` gives the reason for bounds other than the default ones.
    """

    op: str
    label: str
    run: Run = field(repr=False)
    rtol: float = 2e-6
    atol: float = 1e-5
    each: float | None = None
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"

    def on(self, backend: Backend) -> list[np.ndarray]:
        """Run the case on `backend` and return its results as NumPy arrays; most operations have one result."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        with backend.session():
            result = self.run(backend, rng)
            return [as_host(backend, part) for part in (result if isinstance(result, tuple) else (result,))]


def as_host(be: Backend, value: Any) -> np.ndarray:
    return np.asarray(value) if np.isscalar(value) else be.host(value)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def weight(be: Backend, values: np.ndarray, type_name: str = "F32", name: str = "w") -> Any:
    return be.prepare(Weight.pack(name, values, BY_NAME[type_name]))


def norm_weight(be: Backend, rng: np.random.Generator, n: int) -> Any:
    return weight(be, 1 + normal(rng, n, scale=0.2))


def linear(
    be: Backend, rng: np.random.Generator, n: int, k: int, type_name: str = "F32", *, bias: bool = False
) -> Linear:
    made = weight(be, normal(rng, n, k, scale=k**-0.5), type_name)
    return Linear("w", made, weight(be, normal(rng, n)) if bias else None)


def norm_of(be: Backend, rng: np.random.Generator, n: int, kind: str) -> Norm:
    if kind == "rms":
        return RMSNorm("n", norm_weight(be, rng, n), 1e-6)
    return LayerNorm("n", norm_weight(be, rng, n), weight(be, normal(rng, n)), 1e-5)
