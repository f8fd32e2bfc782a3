"""Conversions to vectors by value in the text of whole kernels, where clang's own would keep the bits or refuse."""

from __future__ import annotations

import re

from .text import code_only

_ELEMENTS = "bool|u?char|u?short|u?int|u?long|half|b?float"
_VECTOR = rf"(?:(?:packed_)?(?:{_ELEMENTS})[234])"
_PARAMETER = re.compile(r"\b(?:typename|class)\s+(?!\.)(\w+)\b(?=\s*[,>=])")
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=|\btypedef\b[^;{}]*?\b(\w+)\s*;")


def type_names(text: str) -> list[str]:
    """Return the names that a file gives to types: parameters of templates, and aliases."""
    code = code_only(text, directives=False)
    found = [match[1] for match in _PARAMETER.finditer(code)]
    found += [match[1] or match[2] for match in _ALIAS.finditer(code)]
    return sorted({name for name in found if name not in ("type", "value", "value_type")})


class Rewriter:
    """Rewrites the bodies of functions.

    `(T)x` becomes a conversion by value, for vectors and for types that may be vectors; `T(a, b)` becomes a call of
    `msl_construct<T>`, and `int2 at(a, b);` an initialisation by such a call.
    """

    def __init__(self, text: str) -> None:
        names = "|".join(map(re.escape, type_names(text)))
        kind = rf"(?:{_VECTOR}|vec\s*<[^<>]*>" + (rf"|{names}" if names else "") + ")"
        self._cast = re.compile(
            rf"(?P<before>(?:^|[^\w\s)\]>]|\breturn\b|\belse\b)\s*)\(\s*(?:const\s+|thread\s+)*(?P<type>{kind})\s*\)"
            r"(?=\s*[\w(*&~!.+-])"
        )
        self._declaration = re.compile(rf"(?P<type>\b{_VECTOR})(?P<space>\s+)(?P<name>\w+)\s*\((?=\s*[^\s)])")
        self._call = re.compile(rf"(?<![\w:.~>])(?<!typename )(?P<type>{kind})\s*\((?!\s*[*&)])")

    def rewritten(self, body: str) -> str:
        """Return the body of a function, with the same lines."""
        body = self._cast.sub(lambda match: f"{match['before']}metal::msl_to<{match['type']}>{{}}->*", body)
        body = self._declaration.sub(_initialized, body)
        return self._call.sub(lambda match: f"metal::msl_construct<{match['type']}>(", body)


def _initialized(match: re.Match[str]) -> str:
    return f"{match['type']}{match['space']}{match['name']} = metal::msl_construct<{match['type']}>("
