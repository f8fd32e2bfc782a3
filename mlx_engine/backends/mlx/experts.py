"""Mixtures of experts in MLX operations, for the backends `mlx`, `metal` and `cuda`.

The matrices of all X experts of a layer are one array (X, N, K). `mx.gather_mm` and `mx.gather_qmm` read the chosen
experts from this array on the device, so that the host does not wait for the router.

If memory for experts is bounded (`Slots`), the array has fewer matrices, and the host waits for the router. Chosen
experts that are not in memory are read from the file, and replace the experts that were chosen least often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_engine.backends.experts import Residents, Routing
from mlx_engine.backends.mlx.weights import GroupMatrix, summed_in_float32
from mlx_engine.backends.parameters import Linear
from mlx_engine.errors import ModelError

# From this number of rows on, rows are sorted by expert, as in mlx-lm's SwitchGLU, so that each expert is read once.
MANY = 64


class Stack(Protocol):
    """The matrices (X, N, K) of all experts of a layer."""

    def multiply(self, x: mx.array, ids: mx.array, *, are_sorted: bool) -> mx.array:
        """Multiply each row of x (..., 1, K) by the matrix of its expert in `ids`, and return (..., 1, N).

        `are_sorted` tells MLX that the ids are ascending. MLX may then multiply all rows of an expert together, which
        adds in another order than the multiplication of a single row.
        """


@dataclass(frozen=True, eq=False)
class FloatStack:
    """Matrices (X, N, K) in the type of activations."""

    matrices: mx.array

    def multiply(self, x: mx.array, ids: mx.array, *, are_sorted: bool) -> mx.array:
        # On the CPU `mx.gather_mm` supports only float32.
        given, matrices, _ = summed_in_float32(x, self.matrices.swapaxes(1, 2))
        return mx.gather_mm(given, matrices, rhs_indices=ids, sorted_indices=are_sorted).astype(x.dtype)


@dataclass(frozen=True, eq=False)
class GroupStack:
    """Matrices in one of MLX's quantised formats. The arrays are as in `GroupMatrix`, with a leading axis X."""

    wq: mx.array
    scales: mx.array
    biases: mx.array | None
    group: int
    bits: int
    mode: str

    def multiply(self, x: mx.array, ids: mx.array, *, are_sorted: bool) -> mx.array:
        given, scales, biases = summed_in_float32(x, self.scales, self.biases)
        y = mx.gather_qmm(
            given, self.wq, scales, biases, rhs_indices=ids, group_size=self.group, bits=self.bits,
            mode=self.mode, sorted_indices=are_sorted,
        )  # fmt: skip
        return y.astype(x.dtype)


@dataclass(frozen=True, eq=False)
class BiasedStack:
    """Matrices, and the biases (X, N) that are added to their products."""

    matrices: Stack
    biases: mx.array

    def multiply(self, x: mx.array, ids: mx.array, *, are_sorted: bool) -> mx.array:
        return self.matrices.multiply(x, ids, are_sorted=are_sorted) + self.biases[ids][..., None, :]


class Slots:
    """A stack of n experts, at most `n_slots` in memory. Products have the same bits as if all were in memory."""

    def __init__(self, read: Callable[[int], Stack], n: int, n_slots: int) -> None:
        """Allocate the slots. `read(e)` returns a stack with only expert e."""
        self._read, self._n_slots = read, n_slots
        first = read(0)
        self.nbytes = n * sum(array.nbytes for array in _arrays(first))
        self._held: Stack = _mapped(lambda array: mx.zeros((n_slots, *array.shape[1:]), array.dtype), first)
        mx.eval(_arrays(self._held))
        self._residents = Residents(n, n_slots)

    def multiply(self, x: mx.array, ids: mx.array, *, are_sorted: bool) -> mx.array:
        """Multiply as `Stack.multiply`. If the chosen experts do not fit into the slots, multiply in several rounds."""
        chosen = np.array(ids)
        experts = np.unique(chosen)
        self._residents.count(np.bincount(chosen.reshape(-1), minlength=len(self._residents.slots)))
        if len(experts) <= self._n_slots and not are_sorted:
            self._hold(experts)
            return self._held.multiply(x, mx.array(self._residents.slots[chosen]), are_sorted=False)
        rows = mx.broadcast_to(x, (*chosen.shape, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        of_rows, results, places = chosen.reshape(-1), [], []
        for first in range(0, len(experts), self._n_slots):
            some = experts[first : first + self._n_slots]
            self._hold(some)
            at = np.flatnonzero(np.isin(of_rows, some))
            at = at[np.argsort(self._residents.slots[of_rows[at]], kind="stable")]
            slots = mx.array(self._residents.slots[of_rows[at]])
            results.append(self._held.multiply(rows[mx.array(at)], slots, are_sorted=are_sorted))
            places.append(at)
            mx.eval(results[-1])  # while a product is pending, each write of `_hold` would make MLX copy all slots
        y = mx.concatenate(results)[mx.array(np.argsort(np.concatenate(places)))]
        return y.reshape(*chosen.shape, *y.shape[-2:])

    def _hold(self, experts: np.ndarray) -> None:
        """Read each expert of `experts` that is not in memory into a slot from `_free`."""
        for e in experts[self._residents.slots[experts] < 0].tolist():
            new, slot = self._read(e), self._free(experts)
            self._write(slot, new)
            self._residents.slots[e] = slot  # last, because Ctrl-C may interrupt the write

    def _free(self, kept: np.ndarray) -> int:
        """Return a free slot. If there is none, first drop the least often chosen expert that is not in `kept`."""
        while (free := self._residents.free_slot()) is None:
            coldest = self._residents.coldest(np.isin(np.arange(len(self._residents.slots)), kept))
            self._residents.slots[coldest] = -1
        return free

    def _write(self, slot: int, expert: Stack) -> None:
        held, new = _arrays(self._held), _arrays(expert)
        if [(a.shape[1:], a.dtype) for a in held] != [(a.shape[1:], a.dtype) for a in new]:
            raise ModelError(
                "the experts of a layer are stored in several types, or some have infinite scales; "
                "load the model without experts_memory"
            )
        for array, value in zip(held, new, strict=True):
            array[slot] = value[0]
        mx.eval(held)


def _arrays(stack: Stack) -> list[mx.array]:
    found: list[mx.array] = []
    _mapped(found.append, stack)
    return found


def _mapped(function: Callable[[mx.array], Any], stack: Any) -> Any:
    """Return a stack with `function(array)` in place of each array."""
    values = {field.name: getattr(stack, field.name) for field in fields(stack)}
    made = {name: function(of) for name, of in values.items() if isinstance(of, mx.array)}
    made |= {name: _mapped(function, of) for name, of in values.items() if hasattr(of, "multiply") and name not in made}
    return replace(stack, **made)


def stacked(linears: Sequence[Linear], dtype: mx.Dtype = mx.float32) -> Stack:
    """Return the linear layers of several experts as one stack, evaluated, so that the single matrices can be freed.

    If not all matrices are `GroupMatrix` of one format, all become floats of `dtype`, the type of activations.
    """
    matrices = _stacked([linear.weight for linear in linears], dtype)
    if linears[0].bias is None:
        return matrices
    biases: mx.array = mx.stack([linear.bias for linear in linears])  # type: ignore[misc]
    mx.eval(biases)
    return BiasedStack(matrices, biases)


def _stacked(matrices: Sequence[Any], dtype: mx.Dtype) -> Stack:
    formats = {
        (matrix.group, matrix.bits, matrix.mode) if isinstance(matrix, GroupMatrix) else None for matrix in matrices
    }
    if len(formats) == 1 and (one := formats.pop()) is not None:
        names = ("wq", "scales") if matrices[0].biases is None else ("wq", "scales", "biases")
        parts = [mx.stack([getattr(matrix, name) for matrix in matrices]) for name in names]
        mx.eval(parts)
        return GroupStack(parts[0], parts[1], parts[2] if len(parts) > 2 else None, *one)
    floats = mx.stack([m if isinstance(m, mx.array) else _values(m).astype(dtype) for m in matrices])
    mx.eval(floats)
    return FloatStack(floats)


def _values(matrix: GroupMatrix) -> mx.array:
    return matrix.rows(mx.arange(matrix.shape[0]))


def route(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Return ids and weights as `Backend.route` defines them, without `mx.argsort`, which may reorder equal logits."""
    n_experts, n_used, logits = logits.shape[1], routing.n_used, logits.astype(mx.float32)
    scores = mx.softmax(logits, axis=-1) if routing.scoring == "softmax" else mx.sigmoid(logits)
    ranked = logits if routing.ranks_logits else scores if routing.bias is None else scores + routing.bias
    if routing.groups is not None:
        n, k = routing.groups
        groups = ranked.reshape(len(ranked), n, -1)
        kept = _first(mx.sort(groups, axis=-1)[..., -2:].sum(axis=-1), k)
        ranked = mx.where(kept[..., None], groups, -mx.inf).reshape(ranked.shape)
    chosen = _first(ranked, n_used)
    # Experts that are not chosen get the largest id, so that chosen ids are sorted first. In a row with NaN, fewer than
    # `n_used` experts are chosen, and the largest id, which is valid, fills the rest.
    ids = mx.sort(mx.where(chosen, mx.arange(n_experts), n_experts - 1), axis=-1)[:, :n_used]
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if routing.normalize:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total + routing.sum_eps if routing.sum_eps else total)
    return ids, weights if routing.scales is None else weights * routing.scales[ids]


def _first(values: mx.array, n: int) -> mx.array:
    """Return bools: True for the n largest values of each row; of equal values, those with lower indices."""
    least = mx.sort(values, axis=-1)[:, values.shape[1] - n, None]
    above, equal = values > least, (values == least).astype(mx.int32)
    n_left = n - above.sum(axis=-1, keepdims=True)
    return above | ((equal == 1) & (mx.cumsum(equal, axis=-1) <= n_left))


def multiply(x: mx.array, stack: Stack, ids: mx.array, *, row_by_row: bool) -> mx.array:
    """Return (T*C, N) as `Backend.expert_linear` defines it. x is (T, K) or (T*C, K), with C chosen experts per token.

    `MANY` or more rows are sorted by expert. With `row_by_row`, even sorted rows are multiplied one at a time, so that
    the order of summation is the same for any number of rows.
    """
    each = ids.size // len(x)
    if ids.size < MANY:
        y = stack.multiply(x.reshape(len(ids), -1, 1, x.shape[-1]), ids, are_sorted=False)
        return y.reshape(ids.size, -1)
    order = mx.argsort(ids.reshape(-1))
    y = stack.multiply(x[order // each][:, None], ids.reshape(-1)[order], are_sorted=not row_by_row)
    return y.squeeze(1)[mx.argsort(order)]


def combine(y: mx.array, weights: mx.array) -> mx.array:
    """Return (T, D): for each token, the weighted sum of the rows of its C experts in y (T*C, D).

    The sum is computed in the type of the weights, and rounded to the type of y.
    """
    return (y.reshape(*weights.shape, -1) * weights[:, :, None]).sum(axis=1).astype(y.dtype)
