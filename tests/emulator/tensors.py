"""Kernels of our own that multiply tensors, and mistakes to plant in them, for test_tensors.py."""

from __future__ import annotations

from typing import NamedTuple

HEAD = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""

# y = x * w^T * scales, with weights of a byte that are converted in threadgroup memory, for two SIMD-groups.
TILED = """
kernel void tiled(device half* x [[buffer(0)]], device const char* w [[buffer(1)]],
                  device const half* scales [[buffer(2)]], device float* y [[buffer(3)]],
                  constant int3& size [[buffer(4)]], uint2 at [[threadgroup_position_in_grid]],
                  uint t [[thread_index_in_threadgroup]]) {
  constexpr int M = 16, N = 32, K = 16;
  threadgroup half tile[N * K];
  const int m = size.x, n = size.y, k = size.z;
  auto X = tensor<device half, dextents<int, 2>, tensor_inline>(x, dextents<int, 2>(k, m));
  auto Y = tensor<device float, dextents<int, 2>, tensor_inline>(y, dextents<int, 2>(n, m));
  auto W = tensor<threadgroup half, extents<int, K, N>, tensor_inline>(tile, extents<int, K, N>());
  constexpr auto descriptor =
      matmul2d_descriptor(M, N, K, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<2>> op;
  auto first = X.slice(0, at.y * M);
  auto sum = op.get_destination_cooperative_tensor<decltype(first), decltype(W), float>();
  for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0;
  for (int from = 0; from < k; from += K) {
    for (int i = t; i < N * K; i += 64) {
      const int row = at.x * N + i / K, column = from + i % K;
      tile[i] = row < n && column < k ? half(w[row * k + column]) : half(0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    auto part = X.slice(from, at.y * M);
    op.run(part, W, sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next tile
  }
  for (ushort i = 0; i < sum.get_capacity(); i++) {
    if (!sum.is_valid_element(i)) continue;
    const int column = at.x * N + sum.get_multidimensional_index(i)[0];
    if (column < n) sum[i] *= float(scales[column]);
  }
  auto out = Y.slice(at.x * N, at.y * M);
  sum.store(out);
}
"""

# y = exp(s - max(s)) for the rows of s = q * k^T, with operands in registers; one SIMD-group per 16 rows.
ROWS = """
kernel void rows(device const half* q [[buffer(0)]], device const half* k [[buffer(1)]], device float* y [[buffer(2)]],
                 constant int& count [[buffer(3)]], uint at [[threadgroup_position_in_grid]],
                 ushort lane [[thread_index_in_simdgroup]]) {
  constexpr auto descriptor = matmul2d_descriptor(16, 32, 16, false, true, false, matmul2d_descriptor::mode::multiply);
  matmul2d<descriptor, execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  for (ushort i = 0; i < left.get_capacity(); i++) {
    if (!left.is_valid_element(i)) continue;
    auto where = left.get_multidimensional_index(i);
    const int row = at * 16 + where[1];
    left[i] = row < count ? q[row * 16 + where[0]] : half(0);
  }
  auto right = op.get_right_input_cooperative_tensor<half, half, float>();
  for (ushort i = 0; i < right.get_capacity(); i++) {
    if (!right.is_valid_element(i)) continue;
    auto where = right.get_multidimensional_index(i);
    right[i] = k[where[1] * 16 + where[0]];
  }
  auto s = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, s);
  auto top = op.get_row_reduction_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  reduce_rows(s, top, reduction_operation::max, reduction_operation_identity<float>::max_identity);
  threadgroup float tops[16];
  if (is_iterator_compatible(s, top)) {
    for (auto it = s.begin(); it != s.end(); ++it)
      if (it.is_valid_element()) *it = exp(*it - *top.map_iterator(it));
  } else {
    auto held = tensor<threadgroup float, extents<int, 16>, tensor_inline>(tops, extents<int, 16>());
    top.store(held);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (ushort i = 0; i < s.get_capacity(); i++)
      if (s.is_valid_element(i)) s[i] = exp(s[i] - tops[s.get_multidimensional_index(i)[1]]);
  }
  auto Y = tensor<device float, dextents<int, 2>, tensor_inline>(y, dextents<int, 2>(32, count));
  auto out = Y.slice(0, at * 16);
  s.store(out);
}
"""


class Bug(NamedTuple):
    """A replacement in a kernel that is right.

    Attributes:
        name: what is wrong.
        kernel: "tiled" or "rows".
        old: what the kernel says.
        new: what it says with the bug.
        says: words of the finding; "" if only values are wrong.
        line: words of the line that the finding names.
    """

    name: str
    kernel: str
    old: str
    new: str
    says: str
    line: str


_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_SLICE = "auto part = X.slice(from, at.y * M);"
_TILE = "tile[i] = row < n && column < k ? half(w[row * k + column]) : half(0);"
_EXTENTS = "extents<int, K, N>, tensor_inline>(tile, extents<int, K, N>())"
_ZEROS = "for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0;"
_RIGHT = "i < right.get_capacity(); i++) {\n    if (!right.is_valid_element(i)) continue;"
_FILL = (
    "auto where = left.get_multidimensional_index(i);\n    const int row = at * 16 + where[1];\n"
    "    left[i] = row < count ? q[row * 16 + where[0]] : half(0);"
)
_FLOATS = "tensor<device float, dextents<int, 2>, tensor_inline>"
_M5 = (
    "ushort quad = lane / 4, r = (quad & 4) + lane / 2 % 4 + i / 4 * 8, c = ((quad & 2) + lane % 2) * 4 + i % 4;\n"
    "    left[i] = int(at * 16 + r) < count ? q[(at * 16 + r) * 16 + c] : half(0);"
)

BUGS = [
    # ---- memory ----
    Bug(
        "no barrier before the product",
        "tiled",
        f"    {_BARRIER}\n    auto",
        "    auto",
        "race: read after write",
        "op.run",
    ),
    Bug(
        "no barrier after the product",
        "tiled",
        f"{_BARRIER}  // before",
        "// before",
        "race: write after read",
        "tile[i] =",
    ),
    Bug(
        "a barrier that orders nothing",
        "tiled",
        f"{_BARRIER}\n    auto",
        "threadgroup_barrier(mem_flags::mem_none);\n    auto",
        "race: read after write",
        "op.run",
    ),
    Bug("a row past the weights", "tiled", "row < n && column < k", "column < k", "read buffer 1 'w'", "tile[i] ="),
    Bug("columns past the weights", "tiled", "row < n && column < k", "row < n", "read buffer 1 'w'", "tile[i] ="),
    Bug("a scale past the last", "tiled", "if (column < n) sum", "sum", "read buffer 2 'scales'", "scales[column]"),
    Bug(
        "a tile that is too small", "tiled", "tile[N * K];", "tile[N * K - K];", "threadgroup array 'tile'", "tile[i] ="
    ),
    Bug(
        "a tensor with more rows than x",
        "tiled",
        "dextents<int, 2>(k, m)",
        "dextents<int, 2>(k, m + 1)",
        "read buffer 0 'x'",
        "op.run",
    ),
    Bug(
        "a tensor with more rows than y",
        "tiled",
        "dextents<int, 2>(n, m)",
        "dextents<int, 2>(n, m + 1)",
        "wrote to buffer 3 'y'",
        "sum.store",
    ),
    Bug(
        "no barrier before the maxima are read",
        "rows",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        "race: read after write",
        "tops[",
    ),
    # ---- slices and extents ----
    Bug(
        "a static slice past the rows of x",
        "tiled",
        _SLICE,
        "auto part = X.slice<K, M>(from, at.y * M);",
        "axis . of a slice ends at",
        "op.run",
    ),
    Bug(
        "a static slice past the columns of y",
        "tiled",
        "Y.slice(at",
        "Y.slice<N, M>(at",
        "axis . of a slice ends at",
        "sum.store",
    ),
    Bug("a negative slice", "tiled", _SLICE, "auto part = X.slice(from - 1, at.y * M);", "axis 0 of a slice", "op.run"),
    Bug(
        "extents in the order of the matrix",
        "tiled",
        _EXTENTS,
        _EXTENTS.replace("K, N", "N, K"),
        "the right operand has static extents 32 x 16",
        "op.run",
    ),
    Bug(
        "a transposition that is missing",
        "tiled",
        "K, false, true, false",
        "K, false, false, false",
        "the right operand has static extents 16 x 32",
        "op.run",
    ),
    Bug(
        "a slice of another size than the descriptor",
        "tiled",
        _SLICE,
        "auto part = X.slice<8, dynamic_extent>(from, at.y * M);",
        "the left operand has static extents 8",
        "op.run",
    ),
    Bug(
        "an index past the tensor",
        "tiled",
        "sum.store(out);",
        "sum.store(out);\n  if (t == 0) Y[n, 0] = 0;",
        "index .* along axis 0 of a tensor",
        "Y[n, 0]",
    ),
    # ---- scopes ----
    Bug(
        "a scope of other SIMD-groups",
        "tiled",
        "execution_simdgroups<2>",
        "execution_simdgroups<4>",
        "is for 4 SIMD-groups, and the threadgroup has 64 threads",
        "op.run",
    ),
    Bug(
        "a product of one SIMD-group of two",
        "tiled",
        "op.run(part, W, sum);",
        "if (t < 32) op.run(part, W, sum);",
        "different barriers",
        "op.run",
    ),
    Bug(
        "threads that return before the product",
        "tiled",
        "  auto first =",
        "  if (t >= 48) return;\n  auto first =",
        "have returned",
        "threadgroup_barrier",
    ),
    Bug(
        "a slice of each SIMD-group's own",
        "tiled",
        _SLICE,
        "auto part = X.slice(from, at.y * M + t / 32 * 8);",
        "the left operand is another tensor",
        "op.run",
    ),
    Bug(
        "a product under a condition on the lane",
        "rows",
        "op.run(left, right, s);",
        "if (lane < 16) op.run(left, right, s);",
        "different operations",
        "op.run",
    ),
    # ---- cooperative tensors ----
    Bug("an accumulator that is not set to 0", "tiled", _ZEROS, "", "was never written", "op.run"),
    Bug(
        "an element beyond the capacity",
        "tiled",
        _ZEROS,
        _ZEROS.replace("<", "<="),
        "of a cooperative tensor, but this thread has",
        "sum[i] = 0",
    ),
    Bug(
        "as many elements as on an M5",
        "rows",
        _RIGHT,
        "i < 20; i++) {",
        "of a cooperative tensor, but this thread has",
        "right",
    ),
    Bug(
        "an operand whose last rows are not set",
        "rows",
        "left[i] = row < count ? q[row * 16 + where[0]] : half(0);",
        "if (row < count) left[i] = q[row * 16 + where[0]];",
        r"element \[\d+, \d+\] of the left operand was never written",
        "op.run",
    ),
    Bug("the layout of an M5", "rows", _FILL, _M5, "relies on one GPU's layout", "op.run"),
    Bug(
        "a mapped element without asking",
        "rows",
        "is_iterator_compatible(s, top)",
        "true",
        "map_iterator: in this layout, the thread does not have",
        "map_iterator",
    ),
    # ---- values ----
    Bug("a product that replaces the sum", "tiled", "mode::multiply_accumulate", "mode::multiply", "", "sum.store"),
    Bug(
        "a tile with elements that nobody writes",
        "tiled",
        _TILE,
        "if (row < n && column < k) tile[i] = half(w[row * k + column]);",
        "",
        "sum.store",
    ),
    Bug(
        "rows for columns",
        "tiled",
        "get_multidimensional_index(i)[0]",
        "get_multidimensional_index(i)[1]",
        "",
        "sum.store",
    ),
    Bug("a tile that is left out", "tiled", "from < k; from", "from + K <= k; from", "", "sum.store"),
    Bug("a maximum of at least 0", "rows", ", reduction_operation_identity<float>::max_identity", "", "", "s.store"),
    Bug(
        "columns for rows in an operand",
        "rows",
        "k[where[1] * 16 + where[0]]",
        "k[where[0] * 32 + where[1]]",
        "",
        "s.store",
    ),
]

# What Apple's headers refuse to compile, and its reason.
REFUSED = [
    ("K, false, true, false", "24, false, true, false", "k must be dynamic or a multiple of 16"),
    ("matmul2d_descriptor(M, N,", "matmul2d_descriptor(8, 8,", "at least one of m and n must be a multiple of 16"),
    ("matmul2d_descriptor(M, N,", "matmul2d_descriptor(M, 12,", "m and n must be 1, 2, 4 or multiples of 8"),
    ("decltype(W), float>", "decltype(W), int>", "cannot be multiplied into that destination"),
    (
        "decltype(first), decltype(W), float>",
        f"{_FLOATS}, decltype(W), float>",
        "must be those that the destination was made for",
    ),
]
