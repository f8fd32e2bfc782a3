"""Record the definition of a model's layers: run it once with placeholders, and keep the operations that it calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from mlx_engine.backends.batch import Wanted
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.program import Layers


class Value(Array):
    """A placeholder for an array: an input of the recording, or the result of a recorded operation.

    A definition that branches on a value cannot be recorded: another pass might take the other branch.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise TypeError("a recorded value has no contents to compare")

    def __bool__(self) -> bool:
        raise TypeError("a recorded value is neither true nor false")


class Step(NamedTuple):
    """A recorded operation: its name, its arguments in the order of its signature, and its results."""

    op: str
    args: tuple[Any, ...]
    results: tuple[Value, ...]


class BatchValue(NamedTuple):
    """A placeholder for a batch, with the attributes that a definition may use."""

    positions: Value
    lengths: Value
    wanted: Value
    rows: Value


class Recording(NamedTuple):
    """The definition of all layers as a list of steps."""

    steps: list[Step]
    x: Value
    batch: BatchValue
    y: Array


class CannotCompileError(Exception):
    """A definition cannot be recorded, or needs an operation that the backend's kernels do not have."""


class Recorder:
    """A placeholder for a backend that records which operations are called."""

    tap = None

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def note(self, name: str, x: Value) -> Value:
        """Return x; a recording has no values to tap."""
        return x

    def norm_project(self, *args: Any, **kwargs: Any) -> list[Value]:
        """Record a block that returns one array for each projection."""
        args = _positional("norm_project", args, kwargs)
        return list(self._record("norm_project", args, len(args[2])))

    def head_norm_rope(self, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        """Record a block that returns queries, keys and values."""
        return self._record("head_norm_rope", _positional("head_norm_rope", args, kwargs), 3)

    def __getattr__(self, op: str) -> Callable[..., Value]:
        if op not in _operations():
            raise AttributeError(f"{op} is no operation of a backend")
        return lambda *args, **kwargs: self._record(op, _positional(op, args, kwargs), 1)[0]

    def _record(self, op: str, args: tuple[Any, ...], n_results: int) -> tuple[Value, ...]:
        results = tuple(Value() for _ in range(n_results))
        self.steps.append(Step(op, args, results))
        return results


def _positional(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments, in the order of the operation's signature."""
    bound = _signature(op).bind(None, *args, **kwargs)
    return (*bound.args[1:], *bound.kwargs.values())


@cache
def _operations() -> frozenset[str]:
    from mlx_engine.backends.primitives import OPERATIONS

    return frozenset((*(name for names in OPERATIONS.values() for name in names), "kv_append"))


@cache
def _signature(op: str) -> inspect.Signature:
    from mlx_engine.backends.base import Backend

    return inspect.signature(getattr(Backend, op))


def record(layers: Layers, *, want: Wanted) -> Recording:
    """Run the definition with a recorder in place of a backend, and placeholders in place of arrays.

    Raises:
        CannotCompileError: the definition does something with a placeholder that needs an array.
    """
    recorder, x, batch = Recorder(), Value(), BatchValue(Value(), Value(), Value(), Value())
    try:
        y = layers(recorder, x, batch, want=want)
    except (TypeError, AttributeError) as error:
        raise CannotCompileError(f"a definition that needs arrays: {error}") from error
    return Recording(recorder.steps, x, batch, y)
