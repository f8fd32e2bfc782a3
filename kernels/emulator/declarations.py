"""Find the declarations of a whole .metal file at namespace and class level, without a parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .text import code_only


class Declaration(NamedTuple):
    """A declaration, or a definition with its body.

    Attributes:
        start: where it begins.
        head: the end of what comes before its body; the end of the declaration if it has none.
        end: after its last character.
        scope: the position of the brace around it, by which scopes differ; -1 outside all braces.
        is_class: whether it opens a class, the members of which follow.
    """

    start: int
    head: int
    end: int
    scope: int
    is_class: bool = False

    @property
    def has_body(self) -> bool:
        """Whether a body follows the head."""
        return self.end > self.head


_MARK = re.compile(r"[{}();]")
_LABEL = re.compile(r"\s*(?:(?:public|private|protected)\s*:)?\s*")
_ATTRIBUTES = re.compile(r"\[\[.*?\]\]|__attribute__\s*\(\(.*?\)\)|alignas\s*\([^()]*\)", re.DOTALL)
_CLASS = re.compile(r"\s*(?:typedef\s+)?(?:struct|class|union)\b[^()=]*$")
_NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b[^()]*$|extern\s*$")


def declarations(text: str) -> Iterator[Declaration]:
    """Yield the declarations of preprocessed text in order; bodies of functions are not entered."""
    code = code_only(text, directives=False)
    scopes = [(-1, False)]
    start = position = parentheses = 0
    while mark := _MARK.search(code, position):
        at, position = mark.start(), mark.end()
        if mark.group() in "()":
            parentheses += 1 if mark.group() == "(" else -1
        elif mark.group() == "}":
            scopes = scopes[:-1] or scopes
            start = position
        elif parentheses:
            position = _closing(code, at) if mark.group() == "{" else position
        elif mark.group() == ";":
            yield Declaration(_first(code, start), position, position, scopes[-1][0])
            start = position
        else:
            first = _first(code, start)
            head = code[first:at].strip()
            plain = without_template(_ATTRIBUTES.sub(" ", head)).strip()
            if _NAMESPACE.match(plain):
                scopes.append((at, False))
                start = position
            elif _CLASS.match(plain):
                yield Declaration(first, at, _closing(code, at), scopes[-1][0], is_class=True)
                scopes.append((at, True))
                start = position
            else:
                position = _closing(code, at)
                if "(" in plain and not re.search(r"=\s*$", plain):
                    yield Declaration(first, at, position, scopes[-1][0])
                    start = position


def _first(code: str, start: int) -> int:
    """Return where a declaration's own text begins, after spaces and an access label."""
    label = _LABEL.match(code, start)
    return label.end() if label else start


def _closing(code: str, at: int) -> int:
    """Return the position after the brace that closes the one at `at`; the end of the text if none does."""
    depth = 0
    for brace in re.finditer(r"[{}]", code[at:]):
        depth += 1 if brace.group() == "{" else -1
        if not depth:
            return at + brace.end()
    return len(code)


def without_template(head: str) -> str:
    """Return a head without `template <...>`."""
    while opened := re.match(r"\s*template\s*<", head):
        depth, at = 1, opened.end()
        while depth and at < len(head):
            depth += {"<": 1, ">": -1}.get(head[at], 0)
            at += 1
        head = head[at:]
    return head


# The address space of the object that a member function is called for.
_QUALIFIER = re.compile(r"(\)\s*(?:const\s+)?)((?:thread|device|threadgroup|constant)\b)(?=\s*(?:[{:;]|noexcept))")
_SPACES = re.compile(r"\b(?:thread|device|threadgroup)\b")


def without_twins(text: str) -> str:
    """Return the text with each function once that it defines for several address spaces.

    Functions and specialisations that differ in `thread`, `device`, `threadgroup` and `constant` only would be
    redefinitions, because all address spaces are one memory. Lines keep their numbers.
    """
    text = _QUALIFIER.sub(lambda match: match[1] + re.sub(r"[^\n]", " ", match[2]), text)
    seen: set[tuple[int, str]] = set()
    pieces, last = [], 0
    for one in declarations(text):
        is_plain_class = one.is_class and "<" not in without_template(text[one.start : one.head])
        if one.has_body and one.start >= last and not is_plain_class:
            key = (one.scope, _normal(text[one.start : one.head]))
            if key in seen:
                pieces += [text[last : one.start], re.sub(r"[^\n]", " ", text[one.start : one.end])]
                last = one.end
            seen.add(key)
    return "".join([*pieces, text[last:]])


def _normal(head: str) -> str:
    head = re.sub(r"(?m)^#.*$", "", head).replace("constant", "const")
    words = re.findall(r"\w+|[^\w\s]", _SPACES.sub(" ", head))
    return " ".join(word for i, word in enumerate(words) if not (word == "const" and words[i - 1 : i] == ["const"]))
