"""Mistakes that the emulator has found in published kernels, each in a kernel of our own; see docs/found.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.emulator import (
    CompileError,
    ConvergenceError,
    EmulatorError,
    LaunchError,
    MemoryFaultError,
    RaceError,
    TensorError,
    UndefinedBehaviorError,
)

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
TENSORS = """#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
typedef dextents<int, 2> two;
"""
ADDING = "matmul2d_descriptor::mode::multiply_accumulate"


@dataclass(frozen=True)
class Pattern:
    """A kernel of input x with a mistake, and what mends it.

    Attributes:
        name: the name in docs/found.md.
        body: the kernel's text.
        wrong: the part of the text that is the mistake.
        right: what mends it, in its place.
        caught: the error; None if only the values are wrong.
        says: words of the error, as a regular expression.
        x: the shape of the input.
        y: the shape of the output.
        expected: the reference.
        grid: the threads, also with the mistake if `wrong_call` does not say otherwise.
        threadgroup: the threads of a threadgroup.
        wrong_call: arguments of the call, or of the making, that are the mistake.
        header: the text before the kernel.
    """

    name: str
    body: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    expected: Callable[[Any], Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int] = (32, 1, 1)
    wrong: str = ""
    right: str = ""
    caught: type[EmulatorError] | None = None
    says: str = ""
    wrong_call: dict[str, Any] = field(default_factory=dict)
    header: str = ""


def outcome(pattern: Pattern, *, mended: bool) -> np.ndarray[Any, Any]:
    """Run the kernel through `mx.fast.metal_kernel`, with the mistake or mended."""
    body = pattern.body.replace(pattern.wrong, pattern.right, 1) if mended and pattern.wrong else pattern.body
    given = {"name": "found", "grid": pattern.grid, **({} if mended else pattern.wrong_call)}
    kernel = mx.fast.metal_kernel(
        name=given.pop("name"), input_names=["x"], output_names=["y"], source=body, header=pattern.header
    )
    results = kernel(
        inputs=[mx.array(data(pattern))], threadgroup=pattern.threadgroup, output_shapes=[pattern.y],
        output_dtypes=[mx.float32], **given,
    )  # fmt: skip
    return np.array(results[0])


def data(pattern: Pattern) -> np.ndarray[Any, Any]:
    """Return the input: different numbers without order."""
    return np.random.default_rng(0).standard_normal(pattern.x).astype(np.float32)


def softmax_sum(x: Any) -> Any:
    return np.exp(x - x.max()).sum(keepdims=True)


def normed(x: Any) -> Any:
    return (x - x.mean()) / x.std()


def neighbours(x: Any) -> Any:
    """Return the sum of four neighbours, those beyond the border being 0."""
    padded = np.pad(x, 1)
    return padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]


def pairs(x: Any) -> Any:
    """Return the products of the pairs of the first 1, 2, 3, 1 and 2 numbers."""
    return np.array([x[i] * x[j] for n in (1, 2, 3, 1, 2) for i in range(n) for j in range(i + 1, n)])


PATTERNS = [
    Pattern(
        "a sum written over maxima",
        f"""
        threadgroup float shared[32];
        const uint lane = thread_index_in_simdgroup;
        const uint group = simdgroup_index_in_threadgroup;
        const float value = x[thread_position_in_threadgroup.x];
        float most = simd_max(value);
        if (lane == 0) shared[group] = most;
        {BARRIER}
        most = simd_max(lane < 4 ? shared[lane] : -INFINITY);
        float sum = simd_sum(exp(value - most));
        if (lane == 0) shared[group] = sum;
        {BARRIER}
        sum = simd_sum(lane < 4 ? shared[lane] : 0.0f);
        if (thread_position_in_threadgroup.x == 0) y[0] = sum;
        """,
        (128,), (1,), softmax_sum, (128, 1, 1), (128, 1, 1),
        wrong="float sum = simd_sum(exp",
        right=f"{BARRIER} float sum = simd_sum(exp",
        caught=RaceError,
        says="threadgroup array 'shared'",
    ),
    Pattern(
        "a variance written over the mean",
        f"""
        threadgroup float shared[4];
        const uint group = simdgroup_index_in_threadgroup;
        const uint i = thread_position_in_threadgroup.x;
        const float sum = simd_sum(x[i]);
        if (thread_index_in_simdgroup == 0) shared[group] = sum;
        {BARRIER}
        const float apart = x[i] - (shared[0] + shared[1] + shared[2] + shared[3]) / 128.0f;
        const float square = simd_sum(apart * apart);
        if (thread_index_in_simdgroup == 0) shared[group] = square;
        {BARRIER}
        y[i] = apart * rsqrt((shared[0] + shared[1] + shared[2] + shared[3]) / 128.0f);
        """,
        (128,), (128,), normed, (128, 1, 1), (128, 1, 1),
        wrong="const float square",
        right=f"{BARRIER} const float square",
        caught=RaceError,
        says="threadgroup array 'shared'",
    ),
    Pattern(
        "SIMD groups that overwrite each other's part",
        """
        const float sum = simd_sum(x[thread_position_in_grid.x]);
        if (thread_index_in_simdgroup == 0) y[threadgroup_position_in_grid.x] = sum;
        """,
        (2, 32), (1,), lambda x: x.sum(keepdims=True).reshape(1), (64, 1, 1), (64, 1, 1),
        wrong="const float sum = simd_sum(x[thread_position_in_grid.x]);\n"
        "        if (thread_index_in_simdgroup == 0)",
        right="const float sum = simd_sum(x[thread_index_in_simdgroup] + x[32 + thread_index_in_simdgroup]);\n"
        "        if (thread_position_in_grid.x == 0)",
        caught=RaceError,
        says="output 'y'",
    ),
    Pattern(
        "a number of elements below zero",
        """
        float mine[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const uint first = thread_position_in_threadgroup.x * 4;
        const uint width = x_shape[0];
        const int n = width - first;  // threads beyond the row have less than none
        for (int i = 0; i < 4; i++)
          if (i < n) mine[i] = x[first + i];
        const float mean = simd_sum(mine[0] + mine[1] + mine[2] + mine[3]) / width;
        for (int i = n; i < 4; i++) mine[i] = mean;
        float squares = 0.0f;
        for (int i = 0; i < 4; i++) squares += (mine[i] - mean) * (mine[i] - mean);
        squares = simd_sum(squares);
        if (thread_position_in_threadgroup.x == 0) y[0] = squares / width;
        """,
        (90,), (1,), lambda x: x.var(keepdims=True), (32, 1, 1),
        wrong="int i = n;",
        right="int i = max(n, 0);",
        caught=UndefinedBehaviorError,
        says="index beyond an array's bounds, at body, line 9",
    ),
    Pattern(
        "a barrier that only writers come to",
        """
        threadgroup float parts[4];
        const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
        float sum = simd_sum(x[thread_position_in_threadgroup.x]);
        if (lane == 0) {
          parts[group] = sum;
          threadgroup_barrier(mem_flags::mem_none);
          if (group == 0) y[0] = parts[0] + parts[1] + parts[2] + parts[3];
        }
        """,
        (128,), (1,), lambda x: x.sum(keepdims=True), (128, 1, 1), (128, 1, 1),
        wrong="threadgroup_barrier(mem_flags::mem_none);",
        right=f"}} {BARRIER} if (lane == 0) {{",
        caught=ConvergenceError,
        says=r"threadgroup_barrier \(body, line 7: .*124 thread\(s\) of the threadgroup have returned",
    ),
    Pattern(
        "scores written over scores",
        """
        threadgroup float scores[32];
        const uint lane = thread_index_in_simdgroup;
        float sum = 0.0f;
        for (uint block = 0; block < 96; block += 32) {
          scores[lane] = x[block + lane];
          simdgroup_barrier(mem_flags::mem_threadgroup);
          sum += simd_shuffle_xor(scores[31 - lane], ushort(1));
        }
        sum = simd_sum(sum);
        if (lane == 0) y[0] = sum;
        """,
        (96,), (1,), lambda x: x.sum(keepdims=True), (32, 1, 1),
        wrong="ushort(1));",
        right="ushort(1)); simdgroup_barrier(mem_flags::mem_threadgroup);",
        caught=RaceError,
        says="write after read of threadgroup array 'scores'",
    ),
    Pattern(
        "a pixel read before its mask",
        """
        const int row = thread_position_in_grid.y, column = thread_position_in_grid.x;
        const int height = x_shape[0], width = x_shape[1];
        float sum = 0.0f;
        for (int i = 0; i < 4; i++) {
          const int r = row + (i == 0 ? -1 : i == 1 ? 1 : 0), c = column + (i == 2 ? -1 : i == 3 ? 1 : 0);
          const bool inside = r >= 0 && r < height && c >= 0 && c < width;
          const float value = x[r * width + c];
          sum += inside ? value : 0.0f;
        }
        y[row * width + column] = sum;
        """,
        (5, 6), (5, 6), neighbours, (6, 5, 1), (6, 1, 1),
        wrong="x[r * width + c]",
        right="inside ? x[r * width + c] : 0.0f",
        caught=MemoryFaultError,
        says="input 'x' .*, near body, line 8",
    ),
    Pattern(
        "an integer division",
        """
        const float half_width = x_shape[0] / 2;
        y[thread_position_in_grid.x] = half_width * x[thread_position_in_grid.x];
        """,
        (7,), (7,), lambda x: 3.5 * x, (7, 1, 1), (7, 1, 1),
        wrong="x_shape[0] / 2",
        right="x_shape[0] / 2.0f",
    ),
    Pattern(
        "a row of another array's length",
        """
        const uint row = thread_position_in_grid.y, i = thread_position_in_grid.x;
        const uint from = row * 4 * 5 + i, to = row * 4 * 5 + i;  // x has rows of 20, y of 5
        y[to] = x[from] + x[from + 5] + x[from + 10] + x[from + 15];
        """,
        (3, 4, 5), (3, 5), lambda x: x.sum(axis=1), (5, 3, 1), (5, 1, 1),
        wrong="to = row * 4 * 5 + i",
        right="to = row * 5 + i",
        caught=MemoryFaultError,
        says="wrote to output 'y'",
    ),
    Pattern(
        "the size of a threadgroup at the edge",
        """
        const uint tile = thread_position_in_grid.x / threads_per_threadgroup.x;
        const float sum = simd_sum(x[thread_position_in_grid.x]);
        if (thread_index_in_simdgroup == 0) y[tile] = sum;
        """,
        (40,), (2,), lambda x: np.array([x[:32].sum(), x[32:].sum()]), (40, 1, 1),
        wrong="thread_position_in_grid.x / threads_per_threadgroup.x",
        right="threadgroup_position_in_grid.x",
        caught=MemoryFaultError,
        says="wrote to output 'y'",
    ),
    Pattern(
        "a pair without a place",
        """
        const int task = thread_position_in_grid.x, n = 1 + task % 3;
        int at = 0;  // n numbers have n * (n - 1) / 2 pairs
        for (int t = 0; t < task; t++) at += (1 + t % 3) * (t % 3) / 2;
        for (int i = 0; i < n; i++)
          for (int j = i; j < n; j++) y[at++] = x[i] * x[j];
        """,
        (3,), (5,), pairs, (5, 1, 1),
        wrong="int j = i;",
        right="int j = i + 1;",
        caught=MemoryFaultError,
        says="wrote to output 'y'",
    ),
    Pattern(
        "a row beyond the last one",
        """
        const int first = 2 * thread_position_in_grid.x;
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < 3; k++) {
          for (int r = 0; r < 2; r++) { const int row = first + r; sums[r] += x[row * 3 + k]; }
        }
        for (int r = 0; r < 2 && first + r < 5; r++) y[first + r] = sums[r];
        """,
        (5, 3), (5,), lambda x: x.sum(1), (3, 1, 1),
        wrong="const int row = first + r;",
        right="const int row = min(first + r, 4);",
        caught=MemoryFaultError,
        says="read input 'x' .60 bytes., at byte 60: just past its end",
    ),
    Pattern(
        "a pointer to device memory, for less than eight numbers",
        "const device float* values = x; y[thread_position_in_grid.x] = 2 * values[thread_position_in_grid.x];",
        (6,), (6,), lambda x: 2 * x, (6, 1, 1),
        wrong="const device float*",
        right="auto",
        caught=CompileError,
        says="values",
    ),
    Pattern(
        "a grid of threadgroups",
        "y[threadgroup_position_in_grid.x * 32 + thread_position_in_threadgroup.x] = "
        "2 * x[threadgroup_position_in_grid.x * 32 + thread_position_in_threadgroup.x];",
        (3, 32), (3, 32), lambda x: 2 * x, (96, 1, 1),
        wrong_call={"grid": (3, 1, 1)},
    ),
    Pattern(
        "a template argument that is a float",
        "y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
        (8,), (8,), lambda x: 2 * x, (8, 1, 1),
        caught=LaunchError,
        says="expected an int, a bool or an MLX dtype",
        wrong_call={"template": [("EPS", 1e-6)]},
    ),
    Pattern(
        "a name with a minus sign",
        "y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
        (8,), (8,), lambda x: 2 * x, (8, 1, 1),
        caught=LaunchError,
        says="expected an identifier",
        wrong_call={"name": "norm_eps1e-06"},
    ),
    Pattern(
        "a sum that nobody sets to 0",
        f"""
        auto x_ = tensor<const device float, two, tensor_inline>(x, two(16, 16));
        auto y_ = tensor<device float, two, tensor_inline>(y, two(16, 16));
        constexpr auto descriptor = matmul2d_descriptor(16, 16, 16, false, false, false, {ADDING});
        matmul2d<descriptor, execution_simdgroup> op;
        auto sum = op.get_destination_cooperative_tensor<decltype(x_), decltype(x_), float>();
        op.run(x_, x_, sum);
        sum.store(y_);
        """,
        (16, 16), (16, 16), lambda x: x @ x, (32, 1, 1),
        wrong="op.run",
        right="for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0; op.run",
        caught=TensorError,
        says="of the destination, to which a product is added, was never written.*op.run",
        header=TENSORS,
    ),
    Pattern(
        "a factor that another lane has written",
        """
        auto x_ = tensor<const device float, two, tensor_inline>(x, two(16, 16));
        auto y_ = tensor<device float, two, tensor_inline>(y, two(16, 16));
        threadgroup float factors[16];
        const ushort lane = thread_index_in_simdgroup;
        if (lane < 16) factors[lane] = lane;
        constexpr auto descriptor = matmul2d_descriptor(16, 16, 16);
        matmul2d<descriptor, execution_simdgroup> op;
        auto product = op.get_destination_cooperative_tensor<decltype(x_), decltype(x_), float>();
        op.run(x_, x_, product);
        for (ushort i = 0; i < product.get_capacity(); i++)
          if (product.is_valid_element(i)) product[i] *= factors[product.get_multidimensional_index(i)[1]];
        product.store(y_);
        """,
        (16, 16), (16, 16), lambda x: (x @ x) * np.arange(16)[:, None], (32, 1, 1),
        wrong="op.run",
        right="simdgroup_barrier(mem_flags::mem_threadgroup); op.run",
        caught=RaceError,
        says="read after write of threadgroup array 'factors'",
        header=TENSORS,
    ),
    Pattern(
        "a descriptor for another operand",
        """
        constexpr auto descriptor = matmul2d_descriptor(16, 32, 16);
        matmul2d<descriptor, execution_simdgroup> op;
        auto x_ = op.get_left_input_cooperative_tensor<half, half, float>();
        auto one = op.get_right_input_cooperative_tensor<half, half, float>();
        auto product = op.get_destination_cooperative_tensor<decltype(x_), decltype(one), float>();
        for (ushort i = 0; i < 16; i++) {
          auto at = x_.get_multidimensional_index(i);
          x_[i] = half(x[at[1] * 16 + at[0]]);
        }
        for (ushort i = 0; i < one.get_capacity(); i++) {
          auto at = one.get_multidimensional_index(i);
          one[i] = half(at[0] == at[1]);
        }
        op.run(x_, one, product);
        for (ushort i = 0; i < product.get_capacity(); i++) {
          auto at = product.get_multidimensional_index(i);
          y[at[1] * 16 + at[0]] = product[i];
        }
        """,
        (32, 16), (32, 16), lambda x: x.astype(np.float16).astype(np.float64), (32, 1, 1),
        wrong="16, 32, 16",
        right="32, 16, 16",
        caught=TensorError,
        says="element 8 of a cooperative tensor, but this thread has 8 elements",
        header=TENSORS,
    ),
]  # fmt: skip
