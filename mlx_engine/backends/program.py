"""Programs: how a backend runs a model's layers. The definition of a layer is in `models/decoder.py`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_engine.backends.batch import Batch, Wanted
from mlx_engine.backends.parameters import Array

if TYPE_CHECKING:
    from mlx_engine.backends.base import Backend


class Layers(Protocol):
    """The definition of all layers, written in a backend's operations."""

    def __call__(self, be: Any, x: Array, batch: Any, *, want: Wanted) -> Array:
        """Return hidden states (T, D) of every token, or (R, D) of those that are wanted."""


@dataclass(frozen=True)
class Fused:
    """How many groups of matrices a program multiplies in one job: gate and up, and queries, keys and values."""

    gate_up: int = 0
    qkv: int = 0

    def notes(self) -> tuple[str, ...]:
        """Return a line for people, if there is anything to report."""
        if not self.gate_up and not self.qkv:
            return ()
        return (f"fused {self.gate_up} gate+up pairs, {self.qkv} q,k,v triples",)


class Program(ABC):
    """A model's layers, ready to run on one backend. Owned by the model."""

    fused: Fused = Fused()

    @abstractmethod
    def run(self, x: Array, batch: Batch) -> Array:
        """Return what the layers make of (T, D): (R, D) of the tokens whose logits are wanted.

        Keys and values go to the slots that the batch has for them. Where no logits are wanted, what is returned has no
        meaning.
        """


class OpByOp(Program):
    """The definition itself, run with the backend's operations."""

    def __init__(self, backend: Backend, layers: Layers, fused: Fused | None = None) -> None:
        self._backend, self._layers = backend, layers
        self.fused = fused or Fused()

    def run(self, x: Array, batch: Batch) -> Array:
        """Run the definition."""
        return self._layers(self._backend, x, batch, want=batch.want)


# ---- recording ----


class Value:
    """An array that a recorded operation would return, or an input of the recording.

    A definition that decides something by a value cannot be recorded: it might decide otherwise in another pass.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise TypeError("a recorded value has no contents to compare")

    def __bool__(self) -> bool:
        raise TypeError("a recorded value is neither true nor false")


class Step(NamedTuple):
    """A recorded operation: its name, its arguments in the order of its signature, and what it returns."""

    op: str
    args: tuple[Any, ...]
    results: tuple[Value, ...]


class BatchValue(NamedTuple):
    """Stands in for a batch: what a definition may use of it."""

    positions: Value
    lengths: Value
    wanted: Value
    rows: Value


class Recording(NamedTuple):
    """The definition of all layers as steps."""

    steps: list[Step]
    x: Value
    batch: BatchValue
    y: Value


class CannotCompileError(Exception):
    """A definition that cannot be recorded, or asks for something that the backend's kernels lack."""


class Recorder:
    """Stands in for a backend, and writes down which operations are called."""

    tap = None

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def note(self, name: str, x: Value) -> Value:
        """Return x: there is nothing to look at."""
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
    """Return all arguments in the order of the operation's signature."""
    bound = _signature(op).bind(None, *args, **kwargs)
    return (*bound.args[1:], *bound.kwargs.values())


@cache
def _operations() -> frozenset[str]:
    from mlx_engine.backends.base import OPERATIONS

    return frozenset((*(name for names in OPERATIONS.values() for name in names), "kv_append"))


@cache
def _signature(op: str) -> inspect.Signature:
    from mlx_engine.backends.base import Backend

    return inspect.signature(getattr(Backend, op))


def record(layers: Layers, *, want: Wanted) -> Recording:
    """Run the definition with a recorder in place of a backend, and values in place of arrays.

    Raises:
        CannotCompileError: the definition does with values what can be done with arrays only.
    """
    recorder, x, batch = Recorder(), Value(), BatchValue(Value(), Value(), Value(), Value())
    try:
        y = layers(recorder, x, batch, want=want)
    except (TypeError, AttributeError) as error:
        raise CannotCompileError(f"a definition that needs arrays: {error}") from error
    return Recording(recorder.steps, x, batch, y)
