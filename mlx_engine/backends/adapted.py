"""A backend whose linear layers add the products of adapters: `W x + B (mask * (A x))`.

`weights/adapters.py` explains adapters. `Adapted` stands in for a backend, or for a lowering of it, while the
definition of the layers runs. A block with a linear layer that an adapter changes is composed of smaller operations;
all other operations are the backend's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Activation, Array, Linear, Norm


def adapted(be: Backend, masks: Array | None) -> Backend:
    """Return a backend that adds the products of adapters to rows with these masks (T, M); None adds none."""
    return be if masks is None else cast(Backend, Adapted(be, masks))


class Adapted:
    """A backend whose operations with linear layers add adapters; all other operations are the backend's own."""

    def __init__(self, be: Backend, masks: Array) -> None:
        self._be, self._masks = be, masks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._be, name)

    def linear(self, x: Array, linear: Linear) -> Array:
        """Return `linear(x)`."""
        return self._added(self._be.linear(x, linear), x, linear)

    def norm_project(self, x: Array, norm: Norm | None, projections: Sequence[Linear]) -> list[Array]:
        """Return the projections of the normed x."""
        if all(p.lora is None for p in projections):
            return self._be.norm_project(x, norm, projections)
        h = self._be.norm(x, norm)
        products = self._be.norm_project(h, None, projections)
        return [self._added(y, h, p) for y, p in zip(products, projections, strict=True)]

    def project_norm(self, x: Array, projection: Linear, norm: Norm) -> Array:
        """Return `norm(projection(x))`."""
        if projection.lora is None:
            return self._be.project_norm(x, projection, norm)
        return self._be.norm(self.linear(x, projection), norm)

    def project_add(self, x: Array, projection: Linear, residual: Array) -> Array:
        """Return `residual + projection(x)`."""
        return self._added(self._be.project_add(x, projection, residual), x, projection)

    def project_norm_add(self, x: Array, projection: Linear, norm: Norm, residual: Array) -> Array:
        """Return `residual + norm(projection(x))`."""
        if projection.lora is None:
            return self._be.project_norm_add(x, projection, norm, residual)
        return self._be.norm_add(self.linear(x, projection), norm, residual)

    def norm_gate_up(self, x: Array, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Array:
        """Return `activation(gate(h)) * up(h)`, where h is the normed x."""
        if gate.lora is None and up.lora is None:
            return self._be.norm_gate_up(x, norm, gate, up, activation)
        gates, ups = self.norm_project(x, norm, [gate, up])
        return self._be.gated(gates, ups, activation)

    def norm_up(self, x: Array, norm: Norm | None, up: Linear, activation: Activation) -> Array:
        """Return `activation(up(h))`, where h is the normed x."""
        if up.lora is None:
            return self._be.norm_up(x, norm, up, activation)
        return self._be.activate(self.linear(self._be.norm(x, norm), up), activation)

    def _added(self, y: Array, x: Array, linear: Linear) -> Array:
        """Return y plus the products of the adapters of a linear layer with x."""
        if linear.lora is None:
            return y
        inner = self._be.multiply(self._be.linear(x, linear.lora.a), self._masks)
        return self._be.project_add(inner, linear.lora.b, y)
