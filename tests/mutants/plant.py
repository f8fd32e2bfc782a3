"""A mutant, and the place in the source where it is planted: found by qualified name and by syntax, in any file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Node = ast.expr | ast.stmt


@dataclass(frozen=True)
class Mutant:
    """A bug: in a function of a file, an expression or some statements become others, wherever they stand in it.

    Attributes:
        name: what is wrong.
        where: the qualified name of the function or class, "Class.method", in whichever module it is. The end of a
            module's name before it, "rope.rotated", tells functions of one name apart; alone it is the whole module.
        old: the code to replace; its line breaks, parentheses, quotes and comments need not be those of the file. A
            compound statement whose body is `...` stands for its first line alone.
        new: what it becomes; `...` keeps the body.
    """

    name: str
    where: str
    old: str
    new: str


class NotFoundError(Exception):
    """No module has such a function, the function has no such code, or several have it."""


def found(mutant: Mutant, root: Path) -> tuple[str, str]:
    """Return the file of a mutant, from the root of the repository, and its qualified name within the file.

    Raises:
        NotFoundError: no function of this name has the code, or functions of several files have it.
    """
    parts, places, named = mutant.where.split("."), [], False
    for file, source in _sources(root).items():
        module = f".{file.removesuffix('.py').replace('/', '.')}"
        for n in range(len(parts) + 1):
            where = ".".join(parts[n:])
            if (n == 0 or module.endswith("." + ".".join(parts[:n]))) and (not where or _has(source, parts[-1])):
                named = named or any(name == where for name, _ in _scopes_of(source))
                if _spans(mutant, source, where)[1]:
                    places.append((file, where))
    if len(places) != 1:
        what = f"the code {mutant.old!r}" if named else f"a function of this name, {mutant.where!r}"
        files = ", ".join(file for file, _ in places) or "none"
        raise NotFoundError(
            f"mutant {mutant.name!r}: expected {what} in one file, found {files}; change the mutant with it"
        )
    return places[0]


@cache
def _sources(root: Path) -> dict[str, str]:
    """Return the source of every module, by its path from the root."""
    folders = ("mlx_engine", "kernels")
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def _has(source: str, name: str) -> bool:
    return f"def {name}(" in source or f"class {name}" in source


def planted(mutant: Mutant, source: str, where: str) -> str:
    """Return the source with the bug in a function of it; the rest of the text stays as it is.

    Raises:
        NotFoundError: there is no place for it.
        SyntaxError: the code of the mutant is no Python.
    """
    is_expression, spans = _places(mutant, source, where)
    # Positions count bytes; from the last one on, so that those before stay true.
    text = source.encode()
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == 0x0A)]
    for first, last, column in sorted(spans, reverse=True):
        new = f"({mutant.new})" if is_expression else mutant.new.replace("\n", "\n" + " " * column)
        if not is_expression and _is_header(mutant.old):
            new = new.removesuffix("...")
        text = text[: starts[first[0] - 1] + first[1]] + new.encode() + text[starts[last[0] - 1] + last[1] :]
    return text.decode()


def lines(mutant: Mutant, source: str, where: str) -> set[int]:
    """Return the numbers of the lines that the bug changes, from 1."""
    return {line for first, last, _ in _places(mutant, source, where)[1] for line in range(first[0], last[0] + 1)}


Position = tuple[int, int]
Span = tuple[Position, Position, int]


def _places(mutant: Mutant, source: str, where: str) -> tuple[bool, list[Span]]:
    is_expression, spans = _spans(mutant, source, where)
    if not spans:
        raise NotFoundError(f"mutant {mutant.name!r}: expected the code {mutant.old!r} in {where!r}, found none")
    return is_expression, spans


def _spans(mutant: Mutant, source: str, where: str) -> tuple[bool, list[Span]]:
    """Return whether the bug replaces expressions, and where they, or the statements, stand."""
    scopes = [node for name, node in _scopes_of(source) if name == where]
    is_expression = _is_expression(mutant.old) and _is_expression(mutant.new)
    find = _expressions if is_expression else _statements
    return is_expression, [span for scope in scopes for span in find(scope, mutant.old)]


@cache
def _scopes_of(source: str) -> list[tuple[str, ast.AST]]:
    """Return the scopes of a file. They are kept for the next mutant."""
    return list(_scopes(ast.parse(source), ""))


def _scopes(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Every class and function with its qualified name, beginning with the node itself."""
    yield name, node
    below = _nested(node)
    while below:
        child = below.pop(0)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _scopes(child, f"{name}.{child.name}".removeprefix("."))
        else:
            below[:0] = _nested(child)


def _nested(node: ast.AST) -> list[ast.AST]:
    """Return the statements, handlers and cases of a statement; no others have classes and functions in them."""
    return [
        child for field in ("body", "handlers", "orelse", "finalbody", "cases") for child in getattr(node, field, ())
    ]


def _expressions(scope: ast.AST, old: str) -> Iterator[Span]:
    expression = ast.parse(old, mode="eval").body
    wanted = _dump(expression)
    for node in _below(scope):
        if type(node) is type(expression) and _dump(node) == wanted:
            yield _start(node), _end(node), 0


def _statements(scope: ast.AST, old: str) -> Iterator[Span]:
    wanted = ast.parse(old).body
    if _is_header(old):
        wanted[0].body = []  # type: ignore[attr-defined]
    for node in _below(scope):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            for i in range(len(body) - len(wanted) + 1 if isinstance(body, list) else 0):
                found = body[i : i + len(wanted)]
                if _is_header(old):
                    if _same_header(found[0], wanted[0]):
                        yield _start(found[0]), _start(found[0].body[0]), found[0].col_offset
                elif _all_same(found, wanted):
                    yield _start(found[0]), _end(found[-1]), found[0].col_offset


def _below(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for those inside f-strings: before Python 3.12 these have no place of their own."""
    yield scope
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FormattedValue):
            yield from _below(child)


def _is_expression(code: str) -> bool:
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        return False
    return True


def _is_header(code: str) -> bool:
    """Whether the code is a compound statement with `...` for its body."""
    (first, *more) = ast.parse(code).body
    body: list[Any] = getattr(first, "body", None) or [None]
    return not more and isinstance(body[0], ast.Expr) and _dump(body[0].value) == _dump(ast.Constant(...))


def _same_header(found: ast.stmt, wanted: ast.stmt) -> bool:
    if type(found) is not type(wanted):
        return False
    names = [name for name in found._fields if name not in ("body", "orelse", "decorator_list")]
    return all(_values(found, name) == _values(wanted, name) for name in names)


def _values(node: ast.AST, name: str) -> list[str]:
    value = getattr(node, name)
    return [_dump(v) if isinstance(v, ast.AST) else repr(v) for v in (value if isinstance(value, list) else [value])]


def _all_same(found: Sequence[ast.AST], wanted: Sequence[ast.AST]) -> bool:
    # Dumping is slow, and nearly all statements are of another type.
    return list(map(type, found)) == list(map(type, wanted)) and list(map(_dump, found)) == list(map(_dump, wanted))


def _dump(node: ast.AST) -> str:
    return ast.dump(node)


def _start(node: Any) -> Position:
    return node.lineno, node.col_offset


def _end(node: Any) -> Position:
    return node.end_lineno, node.end_col_offset
