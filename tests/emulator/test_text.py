"""Reading kernel text: comments, and variables in threadgroup memory."""

from __future__ import annotations

import pytest

from kernels.emulator.source import place_threadgroup_memory
from kernels.emulator.text import code_only, threadgroup_declarations


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a // b\nc", "a     \nc"),
        ("a /* b\n c */ d", "a     \n      d"),
        ('f("// no") // yes', "f(       )       "),
        ("'\"' + x // y", "    + x     "),
        ('"a\\"b" c', "       c"),
    ],
)
def test_comments_become_blanks(text: str, code: str):
    assert code_only(text) == code
    assert len(code_only(text)) == len(text)


def found(text: str) -> list[tuple[str, int, tuple[tuple[str, str], ...]]]:
    return [(d.element, d.depth, d.variables) for d in threadgroup_declarations(text)]


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("threadgroup float t[32];", [("float", 0, (("t", "[32]"),))]),
        ("  threadgroup half a[N * 4], b[2][M + 1];", [("half", 0, (("a", "[N * 4]"), ("b", "[2][M + 1]")))]),
        ("threadgroup atomic_uint n;", [("atomic_uint", 0, (("n", ""),))]),
        ("threadgroup vec<T, 4> v[s[1]];", [("vec<T, 4>", 0, (("v", "[s[1]]"),))]),
        ("threadgroup alignas(16) float t[4];", [("float", 0, (("t", "[4]"),))]),
        ("int i;\nthreadgroup\n  float\n  t[3];", [("float", 0, (("t", "[3]"),))]),
        ("if (x) { threadgroup float t[4]; }", [("float", 1, (("t", "[4]"),))]),
        ("threadgroup float t[A > B ? A : B];", [("float", 0, (("t", "[A > B ? A : B]"),))]),
        ("// threadgroup float t[4];", []),
        ("threadgroup float* p = t;", []),
        ("threadgroup float& r = t[0];", []),
        ("const threadgroup float* p = t;", []),
        ("f((threadgroup float4*)t);", []),
        ("void f(threadgroup float* a, threadgroup float b[4]);", []),
        ("for (threadgroup float* p = t;;) {}", []),
    ],
)
def test_threadgroup_variables_are_found(text: str, declared: list[object]):
    assert found(text) == declared


def test_placed_variables_keep_their_lines():
    text = "int a;\nthreadgroup float t[\n  32\n], u[4];\nint b;\n  threadgroup int n;\nint c;"
    placed = place_threadgroup_memory(text).splitlines()
    assert [i for i, line in enumerate(placed) if line.startswith("int ")] == [0, 4, 6]
    assert sum(line.count("msl_threadgroup_array(") for line in placed) == 3
    assert 'msl_threadgroup_array(2, sizeof(msl_type_of_n), "n", 6)' in placed[5]
