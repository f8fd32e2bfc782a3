"""Tests of the contract suite itself: it covers every backend operation and detects every wrong result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends.base import Backend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.primitives import OPERATIONS, Primitives
from tests.contract.cases import CASES, OpCase
from tests.contract.check import check

# Conversions and storage, which many cases use: a fault there must fail at least one case.
CROSSINGS = ("prepare", "array", "host", "token_id", "kv_empty", "kv_write", "kv_copy", "kv_read", "kv_restore")
# `compile` makes programs, compared with single operations in tests/unit/test_compiled_program.py.
NOT_OPERATIONS = {
    *(
        "prepare",
        "array",
        "host",
        "token_id",
        "kv_empty",
        "kv_nbytes",
        "kv_copy",
        "kv_read",
        "kv_restore",
        "session",
        "begin",
        "close",
        "row_sums",
        "bad_rows",
        "wait",
        "read_ahead",
    ),
    *("warm_up", "embeds_stored", "stack", "tap", "note", "compile", "kv_append", "sum_exp", "state_empty"),
    *("state_nbytes", "state_read", "state_restore", "discard", "as_activations", "stack_some"),
}


def operations() -> set[str]:
    return {
        "kv_nbytes",
        "state_nbytes",
        *(name for kind in ("primitive", "block", "dispatch") for name in OPERATIONS[kind]),
    }


def test_every_method_of_the_seam_is_registered_or_known_to_be_no_operation():
    """Taps, the profiler and this suite take their lists from the registered operations."""
    members = {**vars(Primitives), **vars(Backend)}
    methods = {name for name, member in members.items() if callable(member) and not name.startswith("_")}
    registered = [name for names in OPERATIONS.values() for name in names]
    assert methods - NOT_OPERATIONS == set(registered)
    assert len(registered) == len(set(registered))
    abstract = {name for name in methods if getattr(getattr(Backend, name), "__isabstractmethod__", False)}
    assert abstract >= {*OPERATIONS["primitive"], *OPERATIONS["storage"]}
    assert abstract.isdisjoint(OPERATIONS["block"])


def test_every_operation_of_the_seam_has_a_case():
    assert {case.op for case in CASES} == operations()


def test_case_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)


def test_an_incomplete_backend_cannot_be_made():
    class Incomplete(SimdBackend):
        rope = Backend.rope

    with pytest.raises(TypeError, match="rope"):
        Incomplete()


def one_element(x: np.ndarray) -> np.ndarray:
    wrong = np.array(x, copy=True)
    wrong.flat[-1] += 1e-3 * max(float(np.abs(x).max()), 1e-3)
    return wrong


LIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": one_element,
    "a transposed or longer shape": lambda x: x.T if x.ndim == 2 and x.shape[0] != x.shape[1] else x[None],
    "not a number": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x).astype(np.float32),
    "float64": lambda x: x.astype(np.float64),
    "zeros": lambda x: np.zeros_like(x) if np.abs(x).max() > 0 else np.ones_like(x),
}


def told(lie: Callable[[np.ndarray], np.ndarray], value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return lie(value)
    if isinstance(value, list | tuple):
        return type(value)([*value[:-1], told(lie, value[-1])])
    return 0 if value > 100 else value + 1


def liar(op: str, lie: Callable[[np.ndarray], np.ndarray]) -> Backend:
    honest = SimdBackend()
    wrong = copy.copy(honest)
    setattr(wrong, op, lambda *args, **kwargs: told(lie, getattr(honest, op)(*args, **kwargs)))
    return wrong


@pytest.mark.some(1)
@pytest.mark.parametrize("lie", LIES)
def test_a_lying_backend_is_caught_in_every_case(lie: str):
    assert [case.id for case in CASES if not fails_an_assertion(liar(case.op, LIES[lie]), case)] == []


def fails_an_assertion(be: Backend, case: OpCase) -> bool:
    try:
        check(be, case)
    except AssertionError:
        return True
    return False


@pytest.mark.some(1)
@pytest.mark.parametrize("op", CROSSINGS)
def test_a_lie_at_a_crossing_is_caught(op: str):
    lies = {
        "kv_empty": lambda x: x[:, :, :0],
        "kv_write": lambda x: np.roll(x, 1, axis=2),
        "kv_copy": lambda x: np.roll(x, 1, axis=2),
        "kv_read": lambda x: x[::-1],
        "kv_restore": lambda x: np.roll(x, 1, axis=2),
    }
    assert [case for case in CASES if is_caught(liar(op, lies.get(op, one_element)), case)]


def is_caught(be: Backend, case: OpCase) -> bool:
    try:
        check(be, case)
    # Rolling the store makes unwritten slots visible to attention, and their garbage may overflow.
    except (AssertionError, ValueError, IndexError, RuntimeWarning):
        return True
    return False
