"""Refuse recursion, which Metal does not have and clang accepts.

Names tell which functions may call themselves: an overload or a template calls another function of its name. Only then
clang is asked for the calls that it has compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from .text import code_only, line_of

_DEFINED = re.compile(r"\b([A-Za-z_]\w*)\s*\([^;{}]*\)\s*(?:const\s*)?\{")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^;(){}]*>\s*)?\(")
_NO_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof", "alignas"}
_FUNCTION = re.compile(r"^define [^@]*@\"?([\w.$]+)\"?\(", re.MULTILINE)
_CALL = re.compile(r"\bcall [^@\n]*@\"?([\w.$]+)\"?\(")


def suspects(header: str) -> set[str]:
    """Return the names of functions that may call themselves, directly or through others."""
    code = code_only(header, directives=False)
    calls: dict[str, set[str]] = {}
    for match in _DEFINED.finditer(code):
        if match[1] not in _NO_FUNCTIONS:
            calls.setdefault(match[1], set()).update(_CALLED.findall(_block(code, match.end() - 1)))
    return set(_in_cycles(calls))


def defined_at(header: str, name: str) -> int:
    """Return the line in which a function is defined, or 1."""
    code = code_only(header, directives=False)
    return next((line_of(code, match.start()) for match in _DEFINED.finditer(code) if match[1] == name), 1)


def recursive(assembly: str, names: Iterable[str]) -> str | None:
    """Return the name among these of a function that calls itself in LLVM's text of a unit, or None."""
    pieces = _FUNCTION.split(assembly)
    calls = {name: set(_CALL.findall(body)) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    for mangled in _in_cycles(calls):
        for name in names:
            if f"{len(name)}{name}" in mangled:
                return name
    return None


def _block(code: str, start: int) -> str:
    """Return the text from a brace to the one that closes it."""
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if not depth:
            return code[start : i + 1]
    return code[start:]


def _in_cycles(calls: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield what reaches itself."""
    for name in calls:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            called = calls.get(waiting.pop(), set()) - seen
            seen |= called
            waiting += called
        if name in seen:
            yield name
