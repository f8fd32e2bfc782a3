"""Register tiles, generated for registers of any width: dot products, and sums of weighted rows.

This is the order of summation of every float32 dot product, to the last bit (`order_numpy.py` defines it in NumPy):

    Columns are cut into stretches of STRETCH columns; the last one may be shorter. A stretch has 16 sums. Sum l adds
    columns l, l + 16, l + 32, ... of the stretch in this order, from zero, by `sum = fma(weight, x, sum)`. Halves of
    the 16 sums are then added to halves: sums l and l + 8, then sums 4, 2 and 1 apart. The totals of the stretches are
    added in their order, from zero.

The order depends on the number of columns alone. Each (row, vector) pair of a tile has its own 16 sums, in one register
of 16 lanes. With registers of 8 or 4 lanes a tile makes two or four sweeps over its columns, each for a half or a
quarter of the sums. So the order does not constrain the tile's shape, which follows the number of registers: enough
independent sums to hide the latency of multiply-adds, and few enough to stay in registers.

Expanded rows and vectors of n columns are stored in parts, (16 / PART, n / 16, PART). With AVX2 each sweep has its own
part and reads it from end to end. With rows in their own order products took 3 to 10 % longer: the first sweep loaded
whole cache lines, used half of each, and waited for the second-level cache. With AVX2 the sweeps are separate calls,
and the first one keeps its sums in memory. So one sweep of several tiles shares rows in the first-level cache
(`gemm.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import LANES, TILE_ROWS
from ..build.vectors import PART, call_llvm, element_address, everywhere, fold, lanes, register_lanes

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)

# By lanes of a register: vectors of a tile, and registers that hold the sums of a weighted sum. AVX-512 and NEON have
# 32 registers, AVX2 has 16; besides the sums they hold a column of the tile's rows or vectors.
_VECTORS = {16: 6, 8: 3, 4: 6}
_SUMS = {16: 24, 8: 12, 4: 24}
# The most vectors of a tile on any processor.
MOST_VECTORS = max(_VECTORS.values())
# The most floats of sums that one tile keeps between two sweeps.
KEPT = TILE_ROWS * _VECTORS[8] * PART
# Steps of 16 columns per loop iteration.
_UNROLLED = 2


@intrinsic
def tile_vectors(typing: Any) -> Any:
    """Return the most vectors of a tile on the target processor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_I64, _VECTORS[register_lanes()])

    return types.int64(), generate


# ---- instructions ----


def _at(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.gep(pointer, [ir.Constant(_I64, index) if isinstance(index, int) else index])


def _all_at(builder: Any, pointers: list[Any], index: Any) -> list[Any]:
    return [_at(builder, p, index) for p in pointers]


def _load(builder: Any, pointer: Any, at: Any, kind: Any) -> Any:
    loaded = builder.load(builder.bitcast(_at(builder, pointer, at), kind.as_pointer()))
    loaded.align = 4
    return loaded


def _store(builder: Any, value: Any, pointer: Any, at: Any) -> None:
    builder.store(value, builder.bitcast(_at(builder, pointer, at), value.type.as_pointer())).align = 4


def _add_product(builder: Any, a: Any, b: Any, place: Any) -> None:
    """`place = fma(a, b, place)`."""
    builder.store(call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, builder.load(place)]), place)


def _zeros(builder: Any, kind: Any, n: int) -> list[Any]:
    """Return n stack slots for vectors, all zero; LLVM promotes them to registers."""
    places = [cgutils.alloca_once(builder, kind) for _ in range(n)]
    for place in places:
        builder.store(ir.Constant(kind, None), place)
    return places


def _for_steps(builder: Any, n: Any, step: int, unrolled: int, body: Callable[[Any], None]) -> None:
    """Generate a loop of `body(i)` for i = 0, step, ... below n, unrolled; n is a multiple of step."""
    size = step * unrolled
    whole = builder.and_(n, ir.Constant(_I64, -size))
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), whole, ir.Constant(_I64, size), _I64) as (i, _):
        for u in range(unrolled):
            body(builder.add(i, ir.Constant(_I64, step * u)))
    if unrolled > 1:
        with cgutils.for_range_slice(builder, whole, n, ir.Constant(_I64, step), _I64) as (i, _):
            body(i)


def _add_sweeps(builder: Any, sweeps: list[list[Any]]) -> list[Any]:
    """Add halves of the sums to halves while the halves are in different sweeps; `_fours` adds the rest."""
    while len(sweeps) > 1:
        half = len(sweeps) // 2
        pairs = zip(sweeps[:half], sweeps[half:], strict=True)
        sweeps = [[builder.fadd(a, b) for a, b in zip(low, high, strict=True)] for low, high in pairs]
    return sweeps[0]


# ---- dot products ----


def _dots(n_vectors: int, *, expanded: bool) -> Any:
    """Make the tile of TILE_ROWS rows and `n_vectors` vectors over one stretch.

    With `expanded` rows are stored in parts and products are added to y; with AVX2 the tile makes the last sweep alone,
    and finds the sums of the first one at `kept`. Else rows are in their own order and products are written to y.
    """

    @intrinsic
    def tile(
        typing: Any, w: Any, w_at: Any, w_row: Any, x: Any, x_at: Any, x_row: Any, n: Any, kept: Any, kept_at: Any,
        y: Any, y_at: Any, y_row: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, w_at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row = args
            width = register_lanes()
            if n_vectors > _VECTORS[width]:
                return context.get_dummy_value()
            w, x, kept, y = (
                element_address(context, builder, signature.args[i], array, at)
                for i, array, at in ((0, w, w_at), (3, x, x_at), (7, kept, kept_at), (9, y, y_at))
            )
            rows, vectors = _rows_of(builder, w, w_row, TILE_ROWS), _rows_of(builder, x, x_row, n_vectors)
            if expanded and PART < LANES:
                last, kind = _sweep(builder, rows, PART, vectors, PART, n, []), ir.VectorType(_F32, width)
                sweeps = [[_load(builder, kept, i * width, kind) for i in range(len(last))], last]
            else:
                sweeps = _sweeps(builder, rows, vectors, n, w_row, expanded)
            totals = _add_sweeps(builder, sweeps)
            for t, four in enumerate(_fours(builder, totals, width)):
                place = _at(builder, y, builder.mul(y_row, ir.Constant(_I64, t)))
                _store(builder, builder.fadd(_load(builder, place, 0, four.type), four) if expanded else four, place, 0)
            return context.get_dummy_value()

        i = types.int64
        return types.void(w, i, i, x, i, i, i, kept, i, y, i, i), generate

    return tile


def _kept(n_vectors: int) -> Any:
    """Make the first of the two sweeps of AVX2, which writes the sums of `n_vectors` vectors to `kept`."""

    @intrinsic
    def sweep(
        typing: Any, w: Any, w_at: Any, w_row: Any, x: Any, x_at: Any, x_row: Any, n: Any, kept: Any, kept_at: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, w_at, w_row, x, x_at, x_row, n, kept, kept_at = args
            if PART == LANES:
                return context.get_dummy_value()
            w, x, kept = (
                element_address(context, builder, signature.args[i], array, at)
                for i, array, at in ((0, w, w_at), (3, x, x_at), (7, kept, kept_at))
            )
            rows, vectors = _rows_of(builder, w, w_row, TILE_ROWS), _rows_of(builder, x, x_row, n_vectors)
            for i, sums in enumerate(_sweep(builder, rows, PART, vectors, PART, n, [])):
                _store(builder, sums, kept, i * PART)
            return context.get_dummy_value()

        i = types.int64
        return types.void(w, i, i, x, i, i, i, kept, i), generate

    return sweep


def _rows_of(builder: Any, first: Any, row: Any, n: int) -> list[Any]:
    """Return the addresses of n rows that are `row` elements apart."""
    return [_at(builder, first, builder.mul(row, ir.Constant(_I64, r))) for r in range(n)]


def _sweeps(builder: Any, rows: list[Any], vectors: list[Any], n: Any, w_row: Any, expanded: bool) -> list[list[Any]]:
    """Return the sums of each sweep over rows and vectors in their own order; if `expanded`, prefetch nothing."""
    width = register_lanes()
    # The last of several sweeps finds the rows in the first-level cache, so it prefetches the rows of the next tile. A
    # single sweep would become a tenth slower by this.
    after = _all_at(builder, rows, builder.mul(w_row, ir.Constant(_I64, TILE_ROWS)))
    sweeps = []
    for at in range(0, LANES, width):
        ahead = after if not expanded and 0 < at == LANES - width else []
        sweeps.append(
            _sweep(builder, _all_at(builder, rows, at), LANES, _all_at(builder, vectors, at), LANES, n, ahead)
        )
    return sweeps


def _sweep(
    builder: Any, rows: list[Any], step: int, vectors: list[Any], x_step: int, n: Any, after: list[Any]
) -> list[Any]:
    """Return one register of sums for each (row, vector) pair; the pairs of the first vector come first.

    Successive elements of a sum are `step` elements apart in a row and `x_step` elements apart in a vector. The same
    columns of the rows `after`, which are in their own order, are prefetched.
    """
    kind = ir.VectorType(_F32, register_lanes())
    sums = _zeros(builder, kind, len(rows) * len(vectors))

    def add(column: Any) -> None:
        # Hold rows or vectors in registers, whichever are fewer, and load the others one at a time.
        a = _all_at(builder, rows, builder.udiv(column, ir.Constant(_I64, LANES // step)))
        b = _all_at(builder, vectors, builder.udiv(column, ir.Constant(_I64, LANES // x_step)))
        held, loaded = (a, b) if len(a) <= len(b) else (b, a)
        registers = [_load(builder, p, 0, kind) for p in held]
        for p in after:
            address = builder.bitcast(_at(builder, p, column), _I8.as_pointer())
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *(ir.Constant(_I32, i) for i in (0, 3, 1))])
        for i, p in enumerate(loaded):
            one = _load(builder, p, 0, kind)
            for j, other in enumerate(registers):
                r, t = (j, i) if held is a else (i, j)
                _add_product(builder, other, one, sums[t * len(rows) + r])

    _for_steps(builder, n, LANES, _UNROLLED, add)
    return [builder.load(s) for s in sums]


def _fours(builder: Any, sums: list[Any], width: int) -> list[Any]:
    """Return for each vector the totals of the four rows."""
    fours, i = [], 0
    while i < len(sums):
        n = TILE_ROWS
        while 2 * n <= min(len(sums) - i, width):
            n *= 2
        totals = fold(builder, sums[i : i + n])
        fours += [lanes(builder, totals, totals, list(range(j, j + TILE_ROWS))) for j in range(0, n, TILE_ROWS)]
        i += n
    return fours


_add_1, _add_2, _add_3, _add_4, _add_5, _add_6 = (_dots(n, expanded=True) for n in range(1, MOST_VECTORS + 1))
_set_1, _set_2, _set_3, _set_4, _set_5, _set_6 = (_dots(n, expanded=False) for n in range(1, MOST_VECTORS + 1))
_keep_1, _keep_2, _keep_3 = (_kept(n) for n in range(1, _VECTORS[8] + 1))


@jit
def keep_dots(
    w: Any, at: int, w_row: int, x: Any, x_at: int, x_row: int, n_vectors: int, n: int, kept: Any, kept_at: int
) -> None:
    """Make the first of two sweeps; `add_dots` with the same `kept` makes the last one. Only with AVX2.

    Arguments are those of `add_dots`; `w` and `x` begin with the first parts. `kept` gets at most `KEPT` floats.
    """
    if n_vectors == 1:
        _keep_1(w, at, w_row, x, x_at, x_row, n, kept, kept_at)
    elif n_vectors == 2:
        _keep_2(w, at, w_row, x, x_at, x_row, n, kept, kept_at)
    else:
        _keep_3(w, at, w_row, x, x_at, x_row, n, kept, kept_at)


@jit
def add_dots(
    w: Any, at: int, w_row: int, x: Any, x_at: int, x_row: int, n_vectors: int, n: int, kept: Any, kept_at: int, y: Any,
    y_at: int, y_row: int,
) -> None:  # fmt: skip
    """`y[y_at + t y_row + r] += w row r . x vector t` for four rows and T vectors, at most `tile_vectors()`.

    Row r begins at element `at + r w_row` of w, and vector t at element `x_at + t x_row` of x. Both have n columns, a
    multiple of 16 and at most STRETCH. With AVX2 these are the last parts of rows and vectors, and `keep_dots` has
    written the sums of the first parts to `kept`; else they are whole, and `kept` is not used.
    """
    if n_vectors == 1:
        _add_1(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)
    elif n_vectors == 2:
        _add_2(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)
    elif n_vectors == 3:
        _add_3(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)
    elif n_vectors == 4:
        _add_4(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)
    elif n_vectors == 5:
        _add_5(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)
    else:
        _add_6(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row)


@jit
def set_dots(
    w: Any, at: int, w_row: int, x: Any, x_at: int, x_row: int, n_vectors: int, n: int, y: Any, y_at: int, y_row: int
) -> None:
    """`y[y_at + t y_row + r] = w row r . x vector t`, as `add_dots`, with rows and vectors in their own order."""
    if n_vectors == 1:
        _set_1(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)
    elif n_vectors == 2:
        _set_2(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)
    elif n_vectors == 3:
        _set_3(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)
    elif n_vectors == 4:
        _set_4(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)
    elif n_vectors == 5:
        _set_5(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)
    else:
        _set_6(w, at, w_row, x, x_at, x_row, n, y, 0, y, y_at, y_row)


# ---- sums of weighted rows ----


def _weighted(n_sums: int) -> Any:
    """Make the kernel that computes `n_sums` weighted sums of the same rows."""

    @intrinsic
    def kernel(
        typing: Any, weights: Any, w_at: Any, w_row: Any, rows: Any, at: Any, row: Any, n: Any, width: Any, y: Any,
        y_at: Any, y_row: Any, more: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, w_at, w_row, rows, at, row, n, size, y, y_at, y_row, more = args
            width = register_lanes()
            if n_sums > _VECTORS[width]:
                return context.get_dummy_value()
            weights, rows, y = (
                element_address(context, builder, signature.args[i], array, first)
                for i, array, first in ((0, weights, w_at), (3, rows, at), (8, y, y_at))
            )
            sources = [_at(builder, weights, builder.mul(w_row, ir.Constant(_I64, q))) for q in range(n_sums)]
            targets = [_at(builder, y, builder.mul(y_row, ir.Constant(_I64, q))) for q in range(n_sums)]
            # Process as many registers of a row at a time as there are for sums, then half as many, and so on.
            together, first = max(1, LANES // width), ir.Constant(_I64, 0)
            is_more = builder.icmp_signed("!=", more, ir.Constant(_I64, 0))
            while 2 * together * n_sums <= _SUMS[width] and together < 8:
                together *= 2
            while together * width >= LANES:
                step = ir.Constant(_I64, together * width)
                stop = builder.sub(size, builder.srem(builder.sub(size, first), step))
                with cgutils.for_range_slice(builder, first, stop, step, _I64) as (e, _):
                    _weighted_part(builder, sources, rows, row, n, e, targets, together, width, is_more)
                together, first = together // 2, stop
            return context.get_dummy_value()

        i = types.int64
        return types.void(weights, i, i, rows, i, i, i, i, y, i, i, i), generate

    return kernel


def _weighted_part(
    builder: Any, weights: list[Any], rows: Any, row: Any, n: Any, e: Any, targets: list[Any], together: int,
    width: int, more: Any,
) -> None:  # fmt: skip
    """Sum `together` registers of all rows from element e on; `more` continues the sums in the targets."""
    kind = ir.VectorType(_F32, width)
    sums = [_zeros(builder, kind, together) for _ in weights]
    with builder.if_then(more):
        for target, places in zip(targets, sums, strict=True):
            for i, place in enumerate(places):
                builder.store(_load(builder, _at(builder, target, e), i * width, kind), place)

    def step(j: Any) -> None:
        source = _at(builder, rows, builder.add(builder.mul(j, row), e))
        spread = [everywhere(builder, _load(builder, p, j, _F32), width) for p in weights]
        for i in range(together):
            values = _load(builder, source, i * width, kind)
            for weight, places in zip(spread, sums, strict=True):
                _add_product(builder, weight, values, places[i])

    _for_steps(builder, n, 1, 1, step)
    for target, places in zip(targets, sums, strict=True):
        for i, place in enumerate(places):
            _store(builder, builder.load(place), _at(builder, target, e), i * width)


_sum_1, _sum_2, _sum_3, _sum_4, _sum_5, _sum_6 = (_weighted(n) for n in range(1, MOST_VECTORS + 1))


@jit
def sum_weighted(
    weights: Any, w_at: int, w_row: int, n_sums: int, rows: Any, at: int, row: int, n: int, width: int, y: Any,
    y_at: int, y_row: int, more: int,
) -> None:  # fmt: skip
    """`y[y_at + q y_row + e] = sum over j < n of weights[w_at + q w_row + j] * rows[at + j row + e]`, in order of j.

    Each sum begins with zero, or with the value in y if `more` is not 0, and continues by
    `sum = fma(weight, element, sum)`. `n_sums` is at most `tile_vectors()`. The width of a row, the number of elements
    e, is a multiple of 16.
    """
    if n_sums == 1:
        _sum_1(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
    elif n_sums == 2:
        _sum_2(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
    elif n_sums == 3:
        _sum_3(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
    elif n_sums == 4:
        _sum_4(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
    elif n_sums == 5:
        _sum_5(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
    else:
        _sum_6(weights, w_at, w_row, rows, at, row, n, width, y, y_at, y_row, more)
