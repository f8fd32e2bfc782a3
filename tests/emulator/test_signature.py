"""Our copy of MLX's generator, byte for byte against what MLX itself shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from kernels.emulator import LaunchError, metal_kernel
from kernels.emulator.signature import ATTRIBUTES, TYPES


@dataclass(frozen=True)
class Case:
    """A kernel and a call of it."""

    name: str
    inputs: dict[str, mx.array] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=lambda: {"y": mx.float32})
    source: str = "y[0] = 0;"
    header: str = ""
    template: tuple[tuple[str, Any], ...] = ()
    atomic: bool = False


DTYPES = {name: getattr(mx, "bool_" if name == "bool" else name) for name in TYPES}
LARGE, SMALL = mx.zeros((3, 5)), mx.zeros((7,))

CASES = [
    Case("one_of_each_size", {"large": LARGE, "small": SMALL, "scalar": mx.array(2.0)}),
    Case("eight_elements", {"x": mx.zeros((2, 4)), "y7": mx.zeros((7, 1))}),
    Case("no_elements", {"x": mx.zeros((0, 5))}),
    Case("nothing_in"),
    *(Case(f"input_{name}", {"x": mx.zeros((9,), dtype=dtype)}, {"y": dtype}) for name, dtype in DTYPES.items()),
    Case("shape", {"x": LARGE}, source="y[0] = x_shape[0];"),
    Case("strides", {"x": LARGE}, source="y[0] = x_strides[1];"),
    Case("dimensions", {"x": SMALL}, source="y[0] = x_ndim;"),
    Case(
        "all_three", {"a": LARGE, "b": SMALL}, source="y[0] = a_shape[0] + a_strides[0] + a_ndim + b_ndim + b_shape[0];"
    ),
    Case("asked_in_a_comment", {"x": LARGE}, source="// x_ndim and thread_position_in_grid\ny[0] = x[0];"),
    Case(
        "asked_by_another_name", {"x": LARGE, "max": LARGE}, source="int max_shape_of_all = 1; y[0] = max_shape_of_all;"
    ),
    Case("asked_in_the_header", {"x": LARGE}, header="// x_shape thread_position_in_grid\n"),
    Case("scalar_has_no_shape", {"x": mx.array(1)}, source="// x_shape x_strides x_ndim\ny[0] = x;"),
    Case("all_attributes", source="\n".join(f"y[0] += uint3({name}).x;" for name in ATTRIBUTES)),
    *(Case(f"attribute_{name}", {"x": LARGE}, source=f"y[0] = uint3({name}).x;") for name in ATTRIBUTES),
    Case("integers", template=(("A", 3), ("B", 0), ("C", -7), ("D", 2**31 - 1))),
    Case("bools", template=(("A", True), ("B", False))),
    *(Case(f"type_{name}", template=(("T", dtype),)) for name, dtype in DTYPES.items()),
    Case("mixed", {"x": LARGE}, template=(("T", mx.bfloat16), ("N", -1), ("FLAG", True), ("U", mx.bool_))),
    Case("several_outputs", {"x": SMALL}, {"y": mx.float32, "z": mx.bfloat16, "n": mx.int64}),
    Case("atomic", {"x": LARGE}, {"y": mx.float32, "n": mx.uint32}, atomic=True),
    Case("atomic_template", {"x": LARGE}, {"y": mx.int32}, atomic=True, template=(("T", mx.float16),)),
    Case(
        "header",
        {"x": LARGE},
        header="template <typename T>\nT twice(T x) { return x + x; }\n",
        source="y[0] = twice(x[0]);",
    ),
    Case(
        "everything",
        {"x": LARGE.astype(mx.bfloat16), "n": mx.array([1, 2]), "s": mx.array(True)},
        {"y": mx.float16, "z": mx.uint8},
        "// x_strides n_shape simdgroup_index_in_threadgroup thread_index_in_simdgroup grid_size",
        "// header\n",
        (("T", mx.float16), ("N", -12), ("B", False)),
        True,
    ),
]


def shown_by_mlx(case: Case) -> tuple[str, str]:
    """The function's name and the text, as MLX passes them to Metal."""
    kernel: Any = mx.fast.metal_kernel(
        name=case.name,
        input_names=list(case.inputs),
        output_names=list(case.outputs),
        source=case.source,
        header=case.header,
        atomic_outputs=case.atomic,
    )
    seen: list[dict[str, Any]] = []

    def call(*arrays: mx.array) -> Any:
        return kernel(
            inputs=list(arrays),
            output_shapes=[(4,)] * len(case.outputs),
            output_dtypes=list(case.outputs.values()),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            template=list(case.template),
        )

    mx.export_function(seen.append, call, *case.inputs.values())
    (primitive,) = (what for what in seen if what.get("name") == "CustomKernel")
    return primitive["arguments"][0], primitive["arguments"][1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_text_is_that_of_mlx(case: Case):
    function, text = shown_by_mlx(case)
    ours = metal_kernel(
        case.name, list(case.inputs), list(case.outputs), case.source, case.header, atomic_outputs=case.atomic
    )
    made = ours.text(list(case.inputs.values()), list(case.outputs.values()), case.template)
    assert made == text
    assert f"[[kernel]] void {function}(" in made


def test_all_attributes_and_types_are_covered():
    assert len(ATTRIBUTES) == 20
    assert set(TYPES) == {str(dtype).rsplit(".", 1)[-1].removesuffix("_") for dtype in DTYPES.values()}


@pytest.mark.parametrize("value", [1.5, "float33", None, object()])
def test_other_template_arguments_are_refused(value: Any):
    with pytest.raises(LaunchError, match="expected an int, a bool or an MLX dtype"):
        metal_kernel("k", [], ["y"], "").text([], [mx.float32], [("T", value)])
