"""The parameters of a whole kernel: which buffer, threadgroup memory or attribute of the thread each takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .errors import CompileError
from .signature import ATTRIBUTES


class MetalParameter(NamedTuple):
    """One parameter of a kernel.

    Attributes:
        name: its name.
        role: "buffer", "threadgroup" or "attribute".
        slot: the index of the buffer or threadgroup memory.
        type: the text of its type, without address space and `const`, pointer or reference.
        is_reference: whether it is `T&`, not `T*`.
        is_written: whether the kernel may write to it.
        attribute: the attribute of the thread that it has.
        declared: the whole text of its type.
        is_optional: whether a function constant decides if it exists.
    """

    name: str
    role: str
    slot: int
    type: str
    is_reference: bool
    is_written: bool
    attribute: str
    declared: str
    is_optional: bool = False


_ATTRIBUTE = re.compile(r"(\w+)\s*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?")
_BRACKETS = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def parameters(kernel: str, listed: str) -> Iterator[MetalParameter]:
    """Yield the parameters of a kernel's signature.

    Buffers and threadgroup memory without an index get the lowest that is free, in order.

    Raises:
        CompileError: a parameter is neither a buffer nor threadgroup memory nor a known attribute.
    """
    taken: dict[str, set[int]] = {"buffer": set(), "threadgroup": set()}
    written = [_split(one) for one in _separated(listed)]
    for _, given in written:
        for role, used in taken.items():
            if given.get(role):
                used.add(int(given[role]))
    for declared, given in written:
        name, kind, is_pointer, is_reference = _declared(kernel, declared)
        whole = re.sub(rf"\b{name}\b[^*&]*$", "", declared).strip()
        attribute = next((one for one in given if one in ATTRIBUTES), "")
        if attribute:
            yield MetalParameter(name, "attribute", 0, kind, False, False, attribute, "")
            continue
        if not (is_pointer or is_reference):
            found = ", ".join(given) or "no attribute"
            raise CompileError(
                f"kernel '{kernel}', parameter '{name}': expected a buffer, threadgroup memory or an attribute of a "
                f"compute kernel, found {found}; textures, samplers and stage inputs are not supported"
            )
        role = "threadgroup" if re.search(r"\bthreadgroup\b", declared) else "buffer"
        index = int(given[role]) if given.get(role) else next(i for i in range(99) if i not in taken[role])
        taken[role].add(index)
        fixed = re.search(r"\b(?:const|constant)\b", declared.split("*")[0].split("&")[0])
        yield MetalParameter(name, role, index, kind, is_reference, not fixed, "", whole, "function_constant" in given)


def _separated(listed: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, character in enumerate(listed):
        depth += {"(": 1, "[": 1, "<": 1, "{": 1, ")": -1, "]": -1, ">": -1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            yield listed[start:at]
            start = at + 1
    if listed[start:].strip():
        yield listed[start:]


def _split(parameter: str) -> tuple[str, dict[str, str]]:
    """Return a parameter without its attributes, and the attributes with their arguments."""
    given = {
        one[1]: (one[2] or "").strip() for inside in _BRACKETS.findall(parameter) for one in _ATTRIBUTE.finditer(inside)
    }
    return " ".join(_BRACKETS.sub(" ", parameter).split()), given


def _declared(kernel: str, declared: str) -> tuple[str, str, bool, bool]:
    """Return name, type, and whether it is a pointer (or an array), or a reference."""
    found = re.search(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", declared.split("=")[0].strip())
    if found is None:
        raise CompileError(f"kernel '{kernel}': expected a parameter with a name, found `{declared}`")
    kind = declared[: found.start()]
    plain = re.sub(
        r"\b(?:const|constant|device|threadgroup|thread|volatile|restrict|__restrict|coherent)\b|[*&]", " ", kind
    )
    return found[1], " ".join(plain.split()), "*" in kind or bool(found[2]), "&" in kind
