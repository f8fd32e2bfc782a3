"""The cases of every operation of a backend; `scalar` computes the expected result of each in float64.

A case can be run alone: its random numbers are seeded with its id. Every operation has at least a typical, an extreme
and a degenerate case, and an input that is not contiguous where the layout matters.
"""

from __future__ import annotations

from tests.contract import attention_cases, choice_cases, expert_cases, product_cases, state_cases
from tests.contract.case import OpCase

__all__ = ["CASES", "OpCase"]

CASES = [
    *product_cases.CASES,
    *attention_cases.CASES,
    *choice_cases.CASES,
    *expert_cases.CASES,
    *state_cases.CASES,
]
