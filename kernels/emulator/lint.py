"""Before a kernel is compiled, check rules of Metal that clang does not check; afterwards, explain clang's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from .errors import Finding, LintError, Place
from .signature import ATTRIBUTES, Input
from .source import BODY, HEADER
from .text import code_only, line_of, threadgroup_declarations, unsuffixed

Breach = tuple[int, str]  # a broken rule: its position in the text, and a description

_SCALAR = r"(?:bool|u?char|u?short|u?int|u?long|half|b?float|b?float16_t|u?int(?:8|16|32|64)_t)"
# (pattern of text that Metal refuses, explanation)
_REFUSED = (
    (
        re.compile(rf"\(\s*(?:const\s+)?(?:packed_)?{_SCALAR}[234]?\s*(?:const\s*)?\*\s*\)(?=\s*[\w(&])"),
        "`{}` casts to a pointer without an address space; write `device`, `constant`, `threadgroup` or `thread`",
    ),
    (re.compile(r"\bdouble\b"), "`double` is not a type of Metal; write `float`"),
    (
        re.compile(r"\bstatic\s+(?:\w+\s+)*threadgroup\b(?!\s*\w+\s*\*)"),
        "threadgroup memory cannot be static; write `threadgroup T name[n];` in the body",
    ),
)
# (pattern of clang's error, explanation)
_HINTS = (
    # clang reports this error for a declaration that `threadgroup_declarations` does not recognise.
    (
        re.compile(r"automatic variable qualified with an address space"),
        "threadgroup memory needs a declaration such as `threadgroup float name[n];`; write it in this form",
    ),
    (
        re.compile(r"read-only variable is not assignable|cannot assign to"),
        "inputs and constant memory cannot be written; copy the value to a variable, or write to an output",
    ),
    (
        re.compile(r"no matching function for call to '(\w+)'(?s:.*)deduced conflicting types"),
        "the arguments of `{}` must have the same type; convert them, for instance with `float(...)`",
    ),
)
_UNDECLARED = re.compile(r"use of undeclared identifier '(\w+)'")


def check(name: str, header: str, source: str, *, suffixes: bool) -> None:
    """If a kernel breaks rules of Metal, raise LintError with a line for each breach.

    With `suffixes`, a float literal without a suffix is also a breach.
    """
    found: list[str] = []
    for part, text in ((HEADER, header), (BODY, source)):
        rules = [_refused(text)]
        rules += [_threadgroup_memory(text)] if part == HEADER else []
        rules += [_unsuffixed(text)] if suffixes else []
        in_order = sorted(finding for rule in rules for finding in rule)
        found += [f"{part}, line {line_of(text, at)}: {what}" for at, what in in_order]
    if found:
        raise LintError("\n  ".join([f"kernel '{name}' is not valid in Metal", *found]))


def _refused(text: str) -> Iterator[Breach]:
    for pattern, explanation in _REFUSED:
        for match in pattern.finditer(code_only(text)):
            yield match.start(), explanation.format(match.group())


def _unsuffixed(text: str) -> Iterator[Breach]:
    for match in unsuffixed(text):
        literal = match.group()
        yield match.start(), f"`{literal}` has no suffix; write `{literal}f`, because it is a double in CUDA"


_UNFENCED = re.compile(r"\bthreadgroup_barrier\s*\(\s*(?:metal::)?mem_flags::mem_none\s*\)")


@cache
def notes(source: str) -> tuple[Finding, ...]:
    """Return possible mistakes in a body: barriers with `mem_none` in a kernel that has threadgroup memory."""
    code = code_only(source)
    if not any(True for _ in threadgroup_declarations(source)):
        return ()
    lines = sorted({line_of(code, match.start()) for match in _UNFENCED.finditer(code)})
    return tuple(
        Finding(
            "barrier",
            True,
            f"body, line {line}: this barrier orders no memory, though the kernel has threadgroup memory; "
            "write mem_flags::mem_threadgroup if threads share data across it",
            Place((0, 0, 0), (0, 0, 0), BODY, line),
        )
        for line in lines
    )


def _threadgroup_memory(text: str) -> Iterator[Breach]:
    for declared in threadgroup_declarations(text):
        names = ", ".join(name for name, _ in declared.variables)
        yield (
            declared.start,
            f"threadgroup memory `{names}` is outside a kernel; declare it in the body and pass a pointer",
        )


def hints(error: str, inputs: Sequence[tuple[str, Input]]) -> str:
    """Return hints that explain clang's messages (`error`), each on a new line; "" if there are no hints."""
    others = [hint.format(*found.groups()) for pattern, hint in _HINTS if (found := pattern.search(error))]
    return "".join(f"\nhint: {hint}" for hint in (*_attributes(error), *_tiny_inputs(error, inputs), *others))


def _attributes(error: str) -> Iterator[str]:
    for name in dict.fromkeys(_UNDECLARED.findall(error)):
        if name in ATTRIBUTES:
            yield f"`{name}` exists only in the body; pass it to the function as an argument"


def _tiny_inputs(error: str, inputs: Sequence[tuple[str, Input]]) -> Iterator[str]:
    """Explain an error about address spaces if the kernel has inputs of fewer than 8 elements (`constant` memory)."""
    tiny = [name for name, kind in inputs if kind.small]
    if tiny and re.search(r"constant|address space '2'", error):
        yield (
            f"{', '.join(tiny)}: fewer than 8 elements, so MLX passes this as `constant`, not as `device`; "
            "use larger inputs, or functions that accept both address spaces"
        )
