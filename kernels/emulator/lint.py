"""Check rules of Metal and of MLX that clang does not know, before the text is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kernels.emulator.errors import LintError
from kernels.emulator.signature import ATTRIBUTES, Input
from kernels.emulator.source import BODY, HEADER
from kernels.emulator.text import code_only, line_of, threadgroup_declarations

# Position in the text, and description.
Finding = tuple[int, str]

_SCALAR = r"(?:bool|u?char|u?short|u?int|u?long|half|b?float|b?float16_t|u?int(?:8|16|32|64)_t)"
_CAST = re.compile(rf"\(\s*(?:const\s+)?(?:packed_)?{_SCALAR}[234]?\s*(?:const\s*)?\*\s*\)(?=\s*[\w(&])")
_UNSUFFIXED = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?(?![\w.])")
_DECLARED = r"\b(?:uint|ushort|int)[23]?\s+{name}\b"


def check(name: str, header: str, source: str, *, strict: bool) -> None:
    """Refuse a kernel that Metal or MLX would refuse, or, if strict, whose meaning depends on them.

    Raises:
        LintError: the message has all findings.
    """
    found: list[str] = []
    for part, text in ((HEADER, header), (BODY, source)):
        rules = [_not_ascii(text), _casts(text), _threadgroup_memory(text, everywhere=part == HEADER)]
        rules += [_unsuffixed(text)] if strict else []
        rules += [_attributes(text)] if part == HEADER else []
        in_order = sorted(finding for rule in rules for finding in rule)
        found += [f"{part}, line {line_of(text, at)}: {what}" for at, what in in_order]
    if found:
        raise LintError("\n  ".join([f"kernel '{name}' is not what Metal or MLX takes", *found]))


def _not_ascii(text: str) -> Iterator[Finding]:
    if match := re.search(r"[^\x00-\x7F]", text):
        yield match.start(), f"{match.group()!r} is not ASCII, and MLX passes ASCII only, comments included"


def _casts(text: str) -> Iterator[Finding]:
    for match in _CAST.finditer(code_only(text)):
        yield (
            match.start(),
            f"`{match.group()}` casts to a pointer without an address space; "
            "write `device`, `constant`, `threadgroup` or `thread`",
        )


def _unsuffixed(text: str) -> Iterator[Finding]:
    for match in _UNSUFFIXED.finditer(code_only(text)):
        literal = match.group()
        yield match.start(), f"`{literal}` has no suffix; write `{literal}f`, as there is no double in Metal"


def _threadgroup_memory(text: str, *, everywhere: bool) -> Iterator[Finding]:
    for declared in threadgroup_declarations(text):
        if everywhere or declared.depth:
            names = ", ".join(name for name, _ in declared.variables)
            yield declared.start, f"threadgroup memory `{names}` is below the outermost scope of the body; move it up"


def _attributes(text: str) -> Iterator[Finding]:
    """Find attributes that a function uses without a parameter of that name."""
    code = code_only(text)
    for name in ATTRIBUTES:
        used = re.search(rf"\b{name}\b", code)
        if used and not re.search(_DECLARED.format(name=name), code):
            yield used.start(), f"`{name}` is known in the body only; pass it to the function as an argument"


def tiny_inputs(error: str, inputs: Sequence[tuple[str, Input]]) -> str:
    """Return a hint for a kernel that does not compile, if `device` memory in it may be `constant` memory."""
    tiny = [name for name, kind in inputs if kind.small]
    if not tiny or not re.search(r"constant|address space '2'", error):
        return ""
    return (
        f"\nhint: {', '.join(tiny)}: fewer than 8 elements, so MLX passes this as `constant`, not as `device`; "
        "use larger inputs, or text that takes both"
    )
