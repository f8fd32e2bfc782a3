"""Analyse kernel text with regular expressions: blank out comments, find threadgroup variables, literals, casts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

_IGNORED = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)


def code_only(text: str, *, directives: bool = True) -> str:
    """Replace comments, string literals and character literals by spaces. Positions in the text do not change.

    With `directives=False`, preprocessor lines are replaced by spaces, too.
    """
    code = _IGNORED.sub(_blank, text)
    return code if directives else _DIRECTIVE.sub(_blank, code)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


_CAST = re.compile(r"\*\s*(?:const\s*)?\)|_cast\s*<")


@cache
def casts_pointers(text: str) -> bool:
    """Return whether the text may cast pointers. An access may then need a larger alignment than the array's type."""
    return _CAST.search(code_only(text)) is not None


_LARGEST = re.compile(r"\b(?:simd_|quad_|f)(?:max|min)\s*\(")
_FLOAT = re.compile(r"\b(?:float|half|bfloat|float16_t|bfloat16_t|T)[234]?\b[\s*&]*(\w+)")
# Matches a comparison, max, min or clamp of a variable or array whose name is one of NAMES, a placeholder.
_COMPARED = r"""
    (?:NAMES)\b(?:\[[^\]]*\])*\s*(?:[<>=!]=|[<>](?![<>]))
    | (?<![<>-])(?:[<>=!]=|[<>])\s*(?:NAMES)\b(?!\s*>)
    | \b(?:max|min|max3|min3|clamp)\s*\((?:[^;()]|\([^()]*\))*\b(?:NAMES)\b
"""


def compares_numbers(text: str, arrays: Sequence[str]) -> bool:
    """Return whether the text seems to compare floating-point numbers: elements of `arrays`, or float variables."""
    code = code_only(text)
    names = "|".join(map(re.escape, sorted({*arrays, *_FLOAT.findall(code)})))
    compared = re.compile(_COMPARED.replace("NAMES", rf"\b(?:{names})"), re.VERBOSE)
    return bool(names) and (_LARGEST.search(code) or compared.search(code)) is not None


def closing(code: str, at: int) -> int:
    """Return the position after the brace that closes the brace at `at`, or the end of the text."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(code, at):
        depth += 1 if brace.group() == "{" else -1
        if not depth:
            return brace.end()
    return len(code)


def line_of(text: str, position: int) -> int:
    """Return the line number of a position, counted from 1."""
    return text.count("\n", 0, position) + 1


_UNSUFFIXED = re.compile(
    r"(?<![\w.])(?:"
    r"0[xX](?:[\da-fA-F]+\.?[\da-fA-F]*|\.[\da-fA-F]+)[pP][-+]?\d+"
    r"|(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?"
    r")(?![\w.]|\s*##)"
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import|error|warning|pragma)\b[^\n]*", re.MULTILINE)


def unsuffixed(text: str) -> Iterator[re.Match[str]]:
    """Yield the floating-point literals without a suffix, which are doubles in C++ and floats in Metal."""
    return _UNSUFFIXED.finditer(_INCLUDE.sub(_blank, code_only(text)))


def with_suffixes(text: str) -> str:
    """Append the suffix `f` to the literals that `unsuffixed` finds."""
    pieces, last = [], 0
    for literal in unsuffixed(text):
        pieces += [text[last : literal.end()], "f"]
        last = literal.end()
    return "".join([*pieces, text[last:]])


class Declaration(NamedTuple):
    """A statement that declares threadgroup variables, such as `threadgroup float a[32], b[4][8];`."""

    start: int
    end: int  # the position after the semicolon
    depth: int  # number of open braces around the statement
    element: str  # the type of elements: "float"
    variables: tuple[tuple[str, str], ...]  # names with dimensions: ("a", "[32]"), ("b", "[4][8]")


_TOKEN = re.compile(r"[{}();]|\bthreadgroup\b")
_INDEX = r"\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]"
_DECLARATION = re.compile(
    r"threadgroup\s+(?:alignas\s*\([^()]*\)\s*)?"
    r"(?P<element>(?:typename\s+)?[A-Za-z_][\w:]*(?:\s*<[^;{}]*?>(?:::\w+)*)?)\s+"
    # Initialisers are dropped, because Metal does not run them for threadgroup memory.
    rf"(?P<variables>[A-Za-z_]\w*(?:[^;=]*;|\s*(?:{_INDEX}\s*)*=[^;=]*;))"
)
_VARIABLE = re.compile(rf"\s*([A-Za-z_]\w*)\s*((?:{_INDEX}\s*)*)")


def threadgroup_declarations(text: str) -> Iterator[Declaration]:
    """Yield the declarations of variables in threadgroup memory, in order. Pointers to such memory are left out."""
    code = code_only(text, directives=False)
    depth = parentheses = 0
    begins = True  # whether a statement may begin at this position
    last = 0
    for token in _TOKEN.finditer(code):
        begins = begins and not code[last : token.start()].strip()
        last = token.end()
        match token.group():
            case "{":
                depth, begins = depth + 1, True
            case "}":
                depth, begins = depth - 1, True
            case "(":
                parentheses += 1
            case ")":
                parentheses -= 1
            case ";":
                begins = True
            case _:
                found = _DECLARATION.match(code, token.start()) if begins and not parentheses else None
                begins = False
                if found and not re.match(r"\s*[*&]", found["variables"]):
                    yield _declaration(found, depth)


def _declaration(found: re.Match[str], depth: int) -> Declaration:
    variables, position, text = [], 0, found["variables"].rstrip(";").split("=")[0]
    while variable := _VARIABLE.match(text, position):
        variables.append((variable[1], variable[2].strip()))
        position = variable.end() + 1  # after the comma
    return Declaration(found.start(), found.end(), depth, found["element"], tuple(variables))
