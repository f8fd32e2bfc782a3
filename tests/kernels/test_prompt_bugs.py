"""Bugs that are planted in the kernels of prompts: `kernels check` finds each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from kernels import emulator
from kernels.lab.check import Case, Orders, check_cases
from kernels.lab.run import BUILDS
from kernels.metal.cases import cases

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

SIMDGROUPS, TENSORS = "prompt_product", "prompt_product_tensors"
# Two tiles of rows, edges of rows and vectors, and several steps over the columns.
SHAPE = "65 x 128, 48 x float16"
AFFINE = "5 x 128, 33 x bfloat16, affine of 8 bits, groups of 32"
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FIRST, LAST = BARRIER + "    add_tiles", BARRIER + "  }\n  store"
# What is printed of a wrong value.
VALUE = "expected .*, found"


class Bug(NamedTuple):
    """A replacement in the text of one or both kernels, and words of what is found."""

    name: str
    old: str
    new: str
    says: str
    kernels: tuple[str, ...] = (SIMDGROUPS, TENSORS)
    label: str = SHAPE


BUGS = [
    Bug("no barrier before the product", FIRST, "    add_tiles", "race: read after write"),
    Bug("no barrier after the product", LAST, "  }\n  store", "race: write after read"),
    Bug("a barrier that orders nothing", FIRST, FIRST.replace("mem_threadgroup", "mem_none", 1), "race: read after"),
    Bug("a row past the weights", "min(row0 + r, N - 1)", "row0 + r", "read input 'wq'.* past its end"),
    Bug("a vector past x", "min(vector0 + r, count - 1)", "(vector0 + r)", "read input 'x'.* past its end"),
    Bug("vectors past y are stored", "row < N && vector < count", "row < N", "wrote to output 'y'.* past its end"),
    Bug("rows past y are stored", "row < N && vector < count", "vector < count", "output 'y'|expected .*, found"),
    Bug("the last columns are forgotten", "k < K; k += 32", "k < K - 32; k += 32", VALUE),
    Bug(
        "half of each row is filled",
        "thread_index % 2 * 16",
        "thread_index % 2 * 8",
        "race: write after write|no thread has written",
    ),
    Bug(
        "the accumulator is cleared for each tile",
        "    add_tiles",
        "    clear_sums(sums);\n    add_tiles",
        "expected .*",
    ),
    Bug("the accumulator is never cleared", "  clear_sums(sums);\n", "", "found nan|was never written"),
    Bug(
        "every second scale",
        "float(ws[at / GROUP]), float(biases",
        "float(ws[at / GROUP / 2]), float(biases",
        VALUE,
        label=AFFINE,
    ),
    Bug("biases are scales", "float(biases[at / GROUP])", "float(ws[at / GROUP])", VALUE, label=AFFINE),
    Bug("rows of another block", "size_t(min(row0 + r, N - 1)) * K", "size_t(min(r, N - 1)) * K", VALUE),
    Bug("weights are not transposed", "ulong2(0, 0), true)", "ulong2(0, 0), false)", VALUE, (SIMDGROUPS,)),
    Bug(
        "quarters exchanged", "vectors + simdgroup / 2 * 32", "vectors + simdgroup % 2 * 32", "expected", (SIMDGROUPS,)
    ),
    Bug("SIMD-groups share a place", "held = held + simdgroup * 64;", "", "race: ", (SIMDGROUPS,)),
    Bug(
        "no barrier before the copy",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n      UNROLL",
        "UNROLL",
        "race: read after write",
        (SIMDGROUPS,),
    ),
    Bug(
        "a wrong stride",
        "v, vectors + i * 8 * TILE_STRIDE + k, TILE_STRIDE",
        "v, vectors + i * 8 * TILE_STRIDE + k, 32",
        "no thread has written",
        (SIMDGROUPS,),
    ),
    Bug(
        "weights are not transposed", "32, false, true, false", "32, false, false, false", "expected|extent", (TENSORS,)
    ),
    Bug("a scope of two SIMD-groups", "execution_simdgroups<4>", "execution_simdgroups<2>", "SIMD-groups", (TENSORS,)),
    Bug("rows and columns exchanged", "row0 + int(at[0])", "row0 + int(at[1])", VALUE, (TENSORS,)),
    Bug("elements that are not valid", "if (sums.is_valid_element(i)) {", "{", ".", (TENSORS,)),
    Bug("a product that forgets", "mode::multiply_accumulate", "mode::multiply", VALUE, (TENSORS,)),
    Bug(
        "an element beyond the capacity",
        "i < sums.get_capacity(); i++) sums",
        "i <= sums.get_capacity(); i++) sums",
        "of a cooperative tensor, but this thread has",
        (TENSORS,),
    ),
]
CELLS = [(kernel, bug) for bug in BUGS for kernel in bug.kernels]
# One of each kind by default: a race, an edge, a transposition, a stale accumulator.
SAMPLE = {
    (SIMDGROUPS, "no barrier before the product"), (TENSORS, "no barrier after the product"),
    (TENSORS, "a vector past x"), (SIMDGROUPS, "weights are not transposed"),
    (TENSORS, "a product that forgets"),
}  # fmt: skip


def verdict(kernel: str, label: str, old: str = "", new: str = ""):
    (case,) = [case for case in cases(kernel) if case.label == label]
    launch = case.launch()
    text, header = (part.replace(old, new) if old else part for part in (launch.kernel.source, launch.kernel.header))
    assert not old or (text, header) != (launch.kernel.source, launch.kernel.header)
    planted = replace(launch, kernel=replace(launch.kernel, name=f"{kernel}_planted", source=text, header=header))
    orders = Orders((0, 1, 3), BUILDS, lanes="all", suffixes=True)
    return check_cases(kernel, [Case(label, planted, case.expected)], "emulator", orders, bound=1)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        pytest.param(
            kernel, bug, id=f"{kernel}-{bug.name}".replace(" ", "-"),
            marks=[] if (kernel, bug.name) in SAMPLE else pytest.mark.slow,
        )
        for kernel, bug in CELLS
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(kernel: str, bug: Bug) -> None:
    found = verdict(kernel, bug.label, bug.old, bug.new)
    assert not found
    assert re.search(bug.says, found.failures[0].text), found.failures[0].text
    assert re.search(r"(header|body), line \d+", found.failures[0].text), found.failures[0].text


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SIMDGROUPS, TENSORS])
@pytest.mark.parametrize("label", [SHAPE, AFFINE])
def test_without_a_bug_they_are_right_in_16_layouts(kernel: str, label: str) -> None:
    (case,) = [case for case in cases(kernel) if case.label == label]
    orders = Orders(range(16), BUILDS, lanes="all", suffixes=True)
    found = check_cases(kernel, [Case(label, case.launch(), case.expected)], "emulator", orders, bound=1)
    assert found, str(found)
    assert not found.notes
