"""`mlx` with float16 or bfloat16 activations: every operation is within a few roundings of that type.

Each case runs on `mlx` in float32, which `test_ops.py` compares with the definition, and with rounded activations.
"""

import copy
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from tests.contract.cases import CASES, OpCase

# Half the distance from 1 to the next number.
ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
# Cases that say nothing about rounding, and why.
LEFT_OUT = {
    "layer_norm-far-from-zero": "the difference from the mean is smaller than a rounding of the input",
    "norm_experts_add-many-rows": "a rounded router chooses other experts",
    "norm_experts_add-q8_0": "a rounded router chooses other experts",
}
BEYOND_FLOAT16 = ("clamped_swiglu-far", "rms_norm-huge", "scale-tiny")
# Operations on logits, which are float32 for all types of activations.
OF_LOGITS = ("argmax", "sample", "choose", "row_sums", "soft_cap")


@cache
def rounding(activations: str) -> Backend:
    """Return the backend, with the arrays that cases make of their inputs in the type of activations."""
    made: Any = copy.copy(create_backend("mlx", activations=activations))
    array = made.array
    made.array = lambda values: array(values).astype(DTYPES[activations])
    return made


def failure(case: OpCase, activations: str) -> str | None:
    try:
        expected, found = case.on(rounding("f32")), case.on(rounding(activations))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for want, got in zip(expected, found, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"expected {want.dtype} {want.shape}, found {got.dtype} {got.shape}"
        if want.dtype.kind != "f":
            continue
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
        if not error <= 8 * ROUNDOFF[activations]:
            return f"relative error {error:.1e}"
    return None


@pytest.mark.some(1)
@pytest.mark.parametrize("activations", ROUNDOFF)
def test_every_operation_rounds_to_the_type_and_no_further(activations: str):
    left_out = {*LEFT_OUT, *(BEYOND_FLOAT16 if activations == "f16" else ())}
    cases = [case for case in CASES if case.op not in OF_LOGITS and case.id not in left_out]
    assert len(cases) > 200
    failures = {case.id: failure(case, activations) for case in cases}
    assert {name: error for name, error in failures.items() if error is not None} == {}
