"""Totals of the lanes of vectors, halves added to halves. Several vectors are added together to use all lanes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

_I32 = ir.IntType(32)


def lanes(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Return the lanes of a and b, concatenated, at these places."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _two(builder: Any, a: Any, b: Any, distance: int) -> Any:
    """Add lanes that are `distance` apart; sums of a go to lanes without this bit, sums of b to lanes with it."""
    n = a.type.count
    stay = [lane if not lane & distance else n + lane for lane in range(n)]
    move = [lane + distance if not lane & distance else n + lane - distance for lane in range(n)]
    return builder.fadd(lanes(builder, a, b, stay), lanes(builder, a, b, move))


def _one(builder: Any, a: Any, distance: int) -> Any:
    """Add lanes that are `distance` apart; return a vector of half the lanes."""
    low = [lane for lane in range(a.type.count) if not lane & distance]
    return builder.fadd(lanes(builder, a, a, low), lanes(builder, a, a, [lane + distance for lane in low]))


def fold(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector of the totals of 1, 2, 4, ... vectors; halves of each vector are added to halves."""
    distance = vectors[0].type.count
    while distance > 1:
        distance //= 2
        half = len(vectors) // 2
        if half:
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [_two(builder, a, b, distance) for a, b in pairs]
        else:
            vectors = [_one(builder, vectors[0], distance)]
    return vectors[0]


def fold_all(builder: Any, vectors: list[Any]) -> list[Any]:
    """Return the totals of any number of vectors."""
    totals: list[Any] = []
    while vectors:
        n = next(n for n in (16, 8, 4, 2, 1) if n <= min(len(vectors), vectors[0].type.count))
        folded = fold(builder, vectors[:n])
        totals += [builder.extract_element(folded, ir.Constant(_I32, i)) for i in range(n)]
        vectors = vectors[n:]
    return totals
