"""More mistakes: values that no thread has written, arithmetic, and what Metal does not take."""

from __future__ import annotations

from kernels.emulator import CompileError, HangError, LintError, UndefinedBehaviorError
from tests.emulator.bugs import SUFFIXES, Bug

_SUM = "sums[r] = simd_sum(sums[r]);"
_SETUP = "  const int first ="
_CODES = "*(const device uint2*)(wq"

BUGS = [
    # ---- values that no thread has written ----
    Bug("accumulator not set to zero", "sums[r] = 0.0f;", "(void)sums;", None),
    Bug(
        "a maximum with memory that no thread has written",
        "partial[group * ROWS + r] = sums[r];",
        "partial[group * ROWS + r] = max(partial[group * ROWS + r], sums[r]);",
        None,
        build="races",
        note="read threadgroup array 'partial' .*, which no thread has written, at body, line 21",
    ),
    Bug(
        "a maximum with a variable that no thread has written",
        "const float scale = float(",
        "float most[2]; const float scale = max(most[k % 2], 0.0f) + float(",
        None,
    ),
    Bug("threadgroup memory not written", "partial[group * ROWS + r] = sums[r];", "partial[r] = sums[r];", None),
    Bug(
        "lanes beyond the SIMD-group",
        _SUM,
        "for (ushort d = 16; d; d /= 2) sums[r] += simd_shuffle_down(sums[r], ushort(d + 1));",
        None,
    ),
    Bug("output not written", "for (int v = 0; v < V; v++) {", "for (int v = 1; v < V; v++) {", None),
    # ---- arithmetic ----
    Bug(
        "half accumulator",
        "sums[r] += scale * (dot4(codes.x, low) + dot4(codes.y, high));",
        "sums[r] = float(half(sums[r]) + half(scale * (dot4(codes.x, low) + dot4(codes.y, high))));",
        None,
    ),
    Bug("wrong scale", "+ k) / 32]", "+ k) / 64]", None),
    Bug(
        "signed overflow of an index",
        _CODES + " + (row * K + k) / 4)",
        _CODES + " + (row * K * 9000000 + k) % 2 + (row * K + k) / 4)",
        UndefinedBehaviorError,
        r"overflow of \*",
        "undefined",
    ),
    Bug(
        "shift by all bits",
        "codes ^ 0x80808080u",
        "codes ^ (0x80808080u << (codes % 33u * 32u % 64u))",
        UndefinedBehaviorError,
        "shift.*header",
        "undefined",
        header=True,
    ),
    Bug(
        "misaligned vector",
        "x + v * K + k + 4)",
        "x + v * K + k + 3)",
        UndefinedBehaviorError,
        "misaligned access.*input 'x'.*divisible by 16",
    ),
    Bug(
        "value too large for an integer",
        _SETUP,
        "  const int big = int(x[0] * 1e30f); (void)big; if (big == 7) return;\n" + _SETUP,
        UndefinedBehaviorError,
        "cannot hold",
        "undefined",
    ),
    Bug(
        "a row in eight bits",
        _SETUP,
        "  uchar narrow = 250 + threadgroup_position_in_grid.x * 8; if (narrow == 3) return;\n" + _SETUP,
        None,
        build="undefined",
        note="an implicit conversion changes a number from .* to 'uchar'.*: 258 becomes 2, at body",
    ),
    Bug(
        "a loop without an end",
        _SETUP,
        "  volatile int wait = 1; while (wait) {}\n" + _SETUP,
        HangError,
        r"a threadgroup does not end: one of its threads is near body, line 5: `volatile int wait",
        switches={"time_limit": 0.1},
    ),
    Bug(
        "division by zero",
        _SETUP,
        "  if (K / int(lane) == 7) return;\n" + _SETUP,
        UndefinedBehaviorError,
        "division by zero",
        "undefined",
    ),
    # ---- what Metal does not take ----
    Bug(
        "pointer without an address space",
        _SETUP,
        "  const half* scales = ws; if (scales == 0) return;\n" + _SETUP,
        CompileError,
        "body:[0-9]+:[0-9]+: error",
    ),
    Bug("cast without an address space", _CODES, "*(const uint2*)(wq", LintError, "pointer without an address space"),
    Bug(
        "parameter without an address space",
        _SETUP,
        "  const auto first_of = [](const float* p) { return p[0]; };\n  if (first_of(x) > 1e30f) return;\n" + _SETUP,
        CompileError,
        "no matching function",
    ),
    Bug(
        "literal without a suffix, for CUDA",
        "sums[r] = 0.0f;",
        "sums[r] = 0.0;",
        LintError,
        "`0.0` has no suffix",
        switches=SUFFIXES,
    ),
    Bug(
        "double",
        "float scale = float(",
        "double scale = double(",
        LintError,
        "`double` is not a type",
    ),
    Bug(
        "threadgroup memory of a function",
        "  const float4 w =",
        "  threadgroup uint more[4]; more[0] = 0u;\n  const float4 w =",
        LintError,
        "threadgroup memory `more` is outside a kernel",
        header=True,
    ),
    Bug(
        "attribute used in the header",
        "codes ^ 0x80808080u",
        "(codes + 0 * thread_index_in_simdgroup) ^ 0x80808080u",
        CompileError,
        "hint: `thread_index_in_simdgroup` exists only in the body; pass it to the function",
        header=True,
    ),
    Bug(
        "float to bfloat",
        _SETUP,
        "  bfloat narrow = x[0]; if (narrow == bfloat(7.0f)) return;\n" + _SETUP,
        CompileError,
        "bfloat",
    ),
    Bug(
        "a function that calls itself",
        "  const float4 w =",
        "  if (codes == 7u) return dot4(codes + 1u, x);\n  const float4 w =",
        LintError,
        "header, line [0-9]+: `dot4` calls itself; Metal has no recursion",
        header=True,
    ),
    Bug(
        "threadgroup memory that a macro declares",
        _SETUP,
        "#define SHARED(NAME) threadgroup float NAME[4]\n  SHARED(more); more[0] = 0.0f;\n" + _SETUP,
        CompileError,
        "hint: threadgroup memory needs a declaration such as",
    ),
    Bug(
        "static threadgroup memory",
        _SETUP,
        "  static threadgroup float more[4]; more[0] = 0.0f;\n" + _SETUP,
        LintError,
        "cannot be static",
    ),
    Bug(
        "vectors of two types",
        "* x.x + w.y * x.y)",
        "* x.x + w.y * x.y) + (w + int4(x)).x",
        CompileError,
        "cannot convert between vector values|operands to binary expression",
        header=True,
    ),
    Bug(
        "minimum of two types",
        "min(first + r, N - 1)",
        "min(first + r, uint(N - 1))",
        CompileError,
        "no matching function for call to 'min'",
    ),
]
