"""Register tiles, generated for registers of any width: dot products, and sums of weighted rows.

Float32 dot products of linear layers and attention scores are summed in this order, which fixes every bit
(`order_numpy.py` is the same in NumPy):

    Columns are cut into stretches of STRETCH columns; the last one may be shorter. A stretch has 16 sums. Sum l adds
    columns l, l + 16, l + 32, ... of the stretch in this order, from zero, by `sum = fma(weight, x, sum)`. The 16 sums
    are then added in pairs: sums l and l + 8, then sums 4, 2 and 1 apart. The totals of the stretches are added in
    their order, from zero.

A tile multiplies several rows with several input vectors (below: vectors). Each pair of a row and a vector has its own
16 sums, in one register of 16 lanes. With registers of 8 or 4 lanes, a tile makes two or four *sweeps* over its
columns, each for a half or a quarter of the sums. Because pairs do not share sums, the shape of a tile does not change
the order. The shape is chosen by the number of registers: enough independent sums to hide the latency of multiply-adds,
few enough to stay in registers.

Vectors, and rows that are expanded to float32, are stored in parts: n columns have the shape (16 / PART, n / 16, PART).
With AVX2 there are two parts, one for each sweep, otherwise there is one. With AVX2 and columns in their original
order, products took 3 to 10 % longer, because the first sweep used half of each cache line that it loaded. With AVX2,
the two sweeps are separate calls, and the first one writes its sums to memory. So `gemm.py` can run the same sweep of
several tiles while their rows are in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..build.jit import jit
from ..build.layout import LANES, LINE_BYTES, TILE_ROWS
from ..build.vectors import PART, call_llvm, element_address, everywhere, fold, lanes, register_lanes

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)

# _VECTORS maps the number of lanes of a register to the most vectors of a tile, and _SUMS maps it to the number of
# registers for the sums of `weighted_of`. AVX-512 and NEON have 32 registers, AVX2 has 16; loaded elements take the
# rest.
_VECTORS = {16: 6, 8: 3, 4: 6}
_SUMS = {16: 24, 8: 12, 4: 24}
# The same as _SUMS, for rows that are not float32: their scales and converted elements need registers, too.
_SUMS_OF_WIDENED = {16: 16, 8: 8, 4: 16}
# The most vectors of a tile on any processor.
MOST_VECTORS = max(_VECTORS.values())
# A row or a vector of a tile: a function that generates the load of a register of floats. Its argument is the first
# column.
Operand = Callable[[Any], Any]
# A type of stored rows: a function that generates the load of one register of floats. Its arguments are a builder, the
# address of a row (a pointer to bytes), the first column, and the type of the register.
Read = Callable[[Any, Any, Any, Any], Any]
# The largest number of floats that `keep_dots` writes.
KEPT = TILE_ROWS * _VECTORS[8] * PART
# Number of steps of 16 columns per loop iteration.
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
    """Generate `place = fma(a, b, place)`."""
    builder.store(call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, builder.load(place)]), place)


def _zeros(builder: Any, kind: Any, n: int) -> list[Any]:
    """Return n stack slots for vectors, all zero; LLVM promotes them to registers."""
    places = [cgutils.alloca_once(builder, kind) for _ in range(n)]
    for place in places:
        builder.store(ir.Constant(kind, None), place)
    return places


def _for_steps(
    builder: Any, n: Any, step: int, unrolled: int, body: Callable[[Any], None],
    begin: Callable[[Any, int], None] = lambda i, count: None,
) -> None:  # fmt: skip
    """Generate an unrolled loop of `body(i)` for i = 0, step, 2 step, ... < n; n is a multiple of step.

    Each iteration begins with `begin(i, count)`, where `count` is the number of bodies in the iteration.
    """
    size = step * unrolled
    whole = builder.and_(n, ir.Constant(_I64, -size))
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), whole, ir.Constant(_I64, size), _I64) as (i, _):
        begin(i, unrolled)
        for u in range(unrolled):
            body(builder.add(i, ir.Constant(_I64, step * u)))
    if unrolled > 1:
        with cgutils.for_range_slice(builder, whole, n, ir.Constant(_I64, step), _I64) as (i, _):
            begin(i, 1)
            body(i)


def _add_sweeps(builder: Any, sweeps: list[list[Any]]) -> list[Any]:
    """Add the sums of later sweeps to those of earlier sweeps, in halves; `_fours` then adds the lanes of registers."""
    while len(sweeps) > 1:
        half = len(sweeps) // 2
        pairs = zip(sweeps[:half], sweeps[half:], strict=True)
        sweeps = [[builder.fadd(a, b) for a, b in zip(low, high, strict=True)] for low, high in pairs]
    return sweeps[0]


# ---- dot products ----


def _dots(n_vectors: int) -> Any:
    """Make the tile of TILE_ROWS rows and `n_vectors` vectors over one stretch; its products are added to y.

    With AVX2 the tile makes only the second sweep; the sums of the first one are at `kept`.
    """

    @intrinsic
    def tile(
        typing: Any, w: Any, w_at: Any, w_row: Any, x: Any, x_at: Any, x_row: Any, n: Any, kept: Any, kept_at: Any,
        y: Any, y_at: Any, y_row: Any, ahead: Any, step: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, w_at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step = args
            width = register_lanes()
            if n_vectors > _VECTORS[width]:
                return context.get_dummy_value()
            w, x, kept, y = (
                element_address(context, builder, signature.args[i], array, at)
                for i, array, at in ((0, w, w_at), (3, x, x_at), (7, kept, kept_at), (9, y, y_at))
            )
            rows, vectors = _rows_of(builder, w, w_row, TILE_ROWS), _rows_of(builder, x, x_row, n_vectors)
            after = [builder.inttoptr(ahead, _I8.as_pointer())]
            if PART < LANES:
                parts = _floats(builder, rows, 0, PART), _floats(builder, vectors, 0, PART)
                last = _sweep(builder, *parts, n, after, step)
                kind = ir.VectorType(_F32, width)
                sweeps = [[_load(builder, kept, i * width, kind) for i in range(len(last))], last]
            else:
                whole = [
                    (_floats(builder, rows, at, LANES), _floats(builder, vectors, at, LANES), n)
                    for at in range(0, LANES, width)
                ]
                sweeps = [_sweep(builder, *each, after if i == 0 else (), step) for i, each in enumerate(whole)]
            for t, four in enumerate(_fours(builder, _add_sweeps(builder, sweeps), width)):
                place = _at(builder, y, builder.mul(y_row, ir.Constant(_I64, t)))
                _store(builder, builder.fadd(_load(builder, place, 0, four.type), four), place, 0)
            return context.get_dummy_value()

        i = types.int64
        return types.void(w, i, i, x, i, i, i, kept, i, y, i, i, i, i), generate

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
            sums = _sweep(builder, _floats(builder, rows, 0, PART), _floats(builder, vectors, 0, PART), n)
            for i, each in enumerate(sums):
                _store(builder, each, kept, i * PART)
            return context.get_dummy_value()

        i = types.int64
        return types.void(w, i, i, x, i, i, i, kept, i), generate

    return sweep


def _rows_of(builder: Any, first: Any, row: Any, n: int) -> list[Any]:
    """Return the addresses of n rows that are `row` elements apart."""
    return [_at(builder, first, builder.mul(row, ir.Constant(_I64, r))) for r in range(n)]


def _floats(builder: Any, pointers: list[Any], first: int, step: int) -> list[Operand]:
    """Return operands for float32 rows at `pointers`; column c is at element `first + c * step / 16` of a row."""
    kind = ir.VectorType(_F32, register_lanes())

    def operand(pointer: Any) -> Operand:
        pointer = _at(builder, pointer, first)
        return lambda column: _load(
            builder, _at(builder, pointer, builder.udiv(column, ir.Constant(_I64, LANES // step))), 0, kind
        )

    return [operand(pointer) for pointer in pointers]


def _sweep(
    builder: Any, rows: list[Operand], vectors: list[Operand], n: Any, after: Sequence[Any] = (), step: Any = None
) -> list[Any]:  # fmt: skip
    """Return one register of sums for each pair of a row and a vector; the pairs of the first vector come first.

    For each 16 columns, prefetch the cache line at each pointer of `after`, and advance the pointer by `step` bytes.
    An iteration of the loop begins with all its prefetches. If prefetches were between its steps, LLVM would write sums
    to the stack (AVX-512, six vectors).
    """
    (sums,) = _sweeps(builder, [(rows, vectors)], n, after, step)
    return sums


def _sweeps(
    builder: Any, operands: list[tuple[list[Operand], list[Operand]]], n: Any, after: Sequence[Any], step: Any
) -> list[list[Any]]:
    """Make several sweeps in one loop; return the sums of each. `operands` has the rows and vectors of each sweep."""
    kind = ir.VectorType(_F32, register_lanes())
    all_sums = [_zeros(builder, kind, len(rows) * len(vectors)) for rows, vectors in operands]

    def add(column: Any) -> None:
        for (rows, vectors), sums in zip(operands, all_sums, strict=True):
            # Hold a register of each row, or of each vector if these are fewer, and load the others one at a time.
            held, loaded = (rows, vectors) if len(rows) <= len(vectors) else (vectors, rows)
            registers = [load(column) for load in held]
            for i, load in enumerate(loaded):
                one = load(column)
                for j, other in enumerate(registers):
                    r, t = (j, i) if held is rows else (i, j)
                    _add_product(builder, other, one, sums[t * len(rows) + r])

    def prefetch(column: Any, count: int) -> None:
        for pointer in after:
            at = builder.mul(builder.udiv(column, ir.Constant(_I64, LANES)), step)
            for _ in range(count):
                _prefetch(builder, _at(builder, pointer, at))
                at = builder.add(at, step)

    _for_steps(builder, n, LANES, _UNROLLED, add, prefetch)
    return [[builder.load(s) for s in sums] for sums in all_sums]


def _fours(builder: Any, sums: list[Any], width: int) -> list[Any]:
    """Return, for each vector, a register with the totals of the four rows."""
    fours, i = [], 0
    while i < len(sums):
        n = TILE_ROWS
        while 2 * n <= min(len(sums) - i, width):
            n *= 2
        totals = fold(builder, sums[i : i + n])
        fours += [lanes(builder, totals, totals, list(range(j, j + TILE_ROWS))) for j in range(0, n, TILE_ROWS)]
        i += n
    return fours


_add_1, _add_2, _add_3, _add_4, _add_5, _add_6 = map(_dots, range(1, MOST_VECTORS + 1))
_keep_1, _keep_2, _keep_3 = (_kept(n) for n in range(1, _VECTORS[8] + 1))


@jit
def keep_dots(
    w: Any, at: int, w_row: int, x: Any, x_at: int, x_row: int, n_vectors: int, n: int, kept: Any, kept_at: int
) -> None:
    """Make the first of AVX2's two sweeps; `add_dots` with the same `kept` makes the second one.

    Arguments are those of `add_dots`, but w and x are the first parts of rows and vectors. At most `KEPT` floats are
    written to `kept`.
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
    y_at: int, y_row: int, ahead: int, step: int,
) -> None:  # fmt: skip
    """Add `dot(row r of w, vector t of x)` to `y[y_at + t * y_row + r]`, for four rows and `n_vectors` vectors.

    There are at most `tile_vectors()` vectors. Row r begins at element `at + r * w_row` of w, and vector t at element
    `x_at + t * x_row` of x. Both have n columns, a multiple of 16 and at most STRETCH. With AVX2 w and x are the last
    parts of rows and vectors, and `keep_dots` has written the sums of the first parts to `kept`. Without AVX2, w and x
    are whole rows and vectors, and `kept` is not used.

    For each 16 columns, the tile prefetches one cache line: at address `ahead`, then at `ahead + step`, and so on.
    """
    if n_vectors == 1:
        _add_1(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)
    elif n_vectors == 2:
        _add_2(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)
    elif n_vectors == 3:
        _add_3(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)
    elif n_vectors == 4:
        _add_4(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)
    elif n_vectors == 5:
        _add_5(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)
    else:
        _add_6(w, at, w_row, x, x_at, x_row, n, kept, kept_at, y, y_at, y_row, ahead, step)


# ---- stored rows ----


def _switch(builder: Any, value: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Generate a switch over `value`, which does nothing if there is no case for the value."""
    after = builder.append_basic_block("after")
    switch = builder.switch(value, after)
    for number, case in cases.items():
        block = builder.append_basic_block(f"is_{number}")
        switch.add_case(ir.Constant(_I64, number), block)
        builder.position_at_end(block)
        case()
        builder.branch(after)
    builder.position_at_end(after)


def dots_of(read: Read, size: int) -> Any:
    """Make the kernel that writes the dot products of stored rows and a tile of vectors.

    The kernel writes `dot(row r, vector t of x)` to `y[y_at + t * y_row + r]`, for n_rows rows and up to
    `tile_vectors()` vectors, in the order of `add_dots`. Up to three elements after the last row's product are
    overwritten. Rows are `w_row` bytes apart from address w on; vector t begins at element `x_at + t * x_row` of x.
    Both have n columns, a multiple of 16 and at most STRETCH. Each element is converted to float32 in a register, once
    for all vectors; 32 elements are `size` bytes. If `ahead` is not 0, the kernel prefetches two rows for each row that
    it multiplies: the row `ahead` bytes later, and the row of a second array, at address `also`, with the same offset.
    """
    widens = size < 4 * 32

    @intrinsic
    def kernel(
        typing: Any, w: Any, w_row: Any, n_rows: Any, x: Any, x_at: Any, x_row: Any, n_vectors: Any, n: Any, y: Any,
        y_at: Any, y_row: Any, ahead: Any, also: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, w_row, n_rows, x, x_at, x_row, n_vectors, n, y, y_at, y_row, ahead, also = args
            x, y = (
                element_address(context, builder, signature.args[i], array, at)
                for i, array, at in ((3, x, x_at), (8, y, y_at))
            )
            also = builder.select(builder.icmp_signed("==", ahead, ir.Constant(_I64, 0)), w, also)
            w, also = (builder.inttoptr(address, _I8.as_pointer()) for address in (w, also))

            def tiles(count: int) -> None:
                vectors = _rows_of(builder, x, x_row, count)

                def tile(first: Any, apart: Any) -> None:
                    row = builder.mul(first, w_row)
                    rows = _rows_of(builder, _at(builder, w, row), apart, TILE_ROWS)
                    if widens and register_lanes() > 4:
                        after = [_at(builder, w, builder.add(row, ahead)), _at(builder, also, row)]
                        sums = _sums_of_rows(builder, read, size, rows, vectors, n, after)
                    else:
                        _prefetch_rows(builder, w, also, ahead, row, w_row)
                        four = builder.mul(w_row, ir.Constant(_I64, TILE_ROWS))
                        after = [] if widens else _all_at(builder, rows, four)
                        sums = _sums_of_lanes(builder, read, rows, vectors, n, after)
                    places = _rows_of(builder, _at(builder, y, first), y_row, count)
                    for place, four in zip(places, _fours(builder, sums, register_lanes()), strict=True):
                        _store(builder, four, place, 0)

                _for_tiles(builder, n_rows, w_row, tile)

            _switch(builder, n_vectors, {
                count: partial(tiles, count) for count in range(1, _VECTORS[register_lanes()] + 1)
            })  # fmt: skip
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, x, i, i, i, i, y, i, i, i, i), generate

    return kernel


def _for_tiles(builder: Any, n_rows: Any, w_row: Any, tile: Callable[[Any, Any], None]) -> None:
    """Generate `tile(first row, bytes between rows)` for all rows, four at a time.

    If fewer than four rows are left, each of them gets a tile, which reads this row four times, because memory after
    the last row may not be readable.
    """
    zero, four = ir.Constant(_I64, 0), ir.Constant(_I64, TILE_ROWS)
    place = cgutils.alloca_once_value(builder, zero)
    builder.store(zero, place)
    begin, body, end = (builder.append_basic_block(name) for name in ("tiles", "tile", "tiles_end"))
    builder.branch(begin)
    builder.position_at_end(begin)
    first = builder.load(place)
    builder.cbranch(builder.icmp_signed("<", first, n_rows), body, end)
    builder.position_at_end(body)
    after = builder.add(first, four)
    is_whole = builder.icmp_signed("<=", after, n_rows)
    tile(first, builder.select(is_whole, w_row, zero))
    builder.store(builder.select(is_whole, after, builder.add(first, ir.Constant(_I64, 1))), place)
    builder.branch(begin)
    builder.position_at_end(end)


def _prefetch_rows(builder: Any, w: Any, also: Any, ahead: Any, row: Any, w_row: Any) -> None:
    """If `ahead` is not 0, prefetch four rows of w, from byte `row + ahead` on, and of `also`, from byte `row` on."""
    with builder.if_then(builder.icmp_signed("!=", ahead, ir.Constant(_I64, 0))):
        stop = builder.add(row, builder.mul(w_row, ir.Constant(_I64, TILE_ROWS)))
        with cgutils.for_range_slice(builder, row, stop, ir.Constant(_I64, LINE_BYTES), _I64) as (at, _):
            for address in (_at(builder, w, builder.add(at, ahead)), _at(builder, also, at)):
                _prefetch(builder, address)


def _prefetch(builder: Any, address: Any) -> None:
    hints = [ir.Constant(_I32, i) for i in (0, 3, 1)]
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])


def _lanes_of(builder: Any, read: Read, rows: list[Any], first: int) -> list[Operand]:
    """Return operands for stored rows, from element `first` of each 16 columns on."""
    kind = ir.VectorType(_F32, register_lanes())

    def operand(row: Any) -> Operand:
        return lambda column: read(builder, row, builder.add(column, ir.Constant(_I64, first)), kind)

    return [operand(row) for row in rows]


def _sums_of_lanes(
    builder: Any, read: Read, rows: list[Any], vectors: list[Any], n: Any, after: list[Any]
) -> list[Any]:  # fmt: skip
    """Return the sums of four stored rows and some vectors, in the order of `_sweep`.

    Each sweep computes as many of the 16 sums as a register has lanes. In the last of several sweeps, the rows are in
    the L1 cache already, so this sweep prefetches the next rows, `after`. A single sweep (AVX-512) does not prefetch,
    because it would become a tenth slower.
    """
    width, line, sweeps = register_lanes(), ir.Constant(_I64, LINE_BYTES), []
    for first in range(0, LANES, width):
        stored, ahead = _lanes_of(builder, read, rows, first), after if 0 < first == LANES - width else []
        sweeps.append(_sweep(builder, stored, _floats(builder, vectors, first, LANES), n, ahead, line))
    return _add_sweeps(builder, sweeps)


def _sums_of_rows(
    builder: Any, read: Read, size: int, rows: list[Any], vectors: list[Any], n: Any, after: list[Any]
) -> list[Any]:  # fmt: skip
    """Return the sums that `_sums_of_lanes` returns; one loop makes all sweeps of four rows, or with AVX2 of two rows.

    So the scale of a Q8_0 block is converted once, not once per sweep, which saves a tenth of the time with AVX2. With
    NEON this function is not used, because it would load each vector again for every row. The loops prefetch four rows
    at each pointer of `after`, a few lines at a time; with bursts of prefetches, attention would take 5 % longer.
    """
    starts = range(0, LANES, register_lanes())
    count = TILE_ROWS // len(starts)
    step = count * LANES * size // 32
    found = []
    for i in range(len(starts)):
        begin = builder.mul(builder.udiv(n, ir.Constant(_I64, LANES)), ir.Constant(_I64, i * step))
        ahead = [_at(builder, _at(builder, p, begin), line) for p in after for line in range(0, step, LINE_BYTES)]
        some = rows[i * count : (i + 1) * count]
        operands = [(_lanes_of(builder, read, some, at), _floats(builder, vectors, at, LANES)) for at in starts]
        found.append(_add_sweeps(builder, _sweeps(builder, operands, n, ahead, ir.Constant(_I64, step))))
    return [sums[t * count + r] for t in range(len(vectors)) for sums in found for r in range(count)]


def weighted_of(read: Read, *, widens: bool) -> Any:
    """Make the kernel that writes weighted sums of stored rows.

    There are up to `tile_vectors()` weighted sums of the same n rows. The kernel writes element e of sum q to
    `y[y_at + q * y_row + e]`. This element begins with zero, or with the value in y if `more` is not 0, and continues
    for j = 0 ... n - 1 by `sum = fma(weights[w_at + q * w_row + j], element e of row j, sum)`. Rows are `row` bytes
    apart from address `rows` on, and have `size` elements, a multiple of 16. Each element is converted to float32 in a
    register, once for all sums; `widens` is False if rows are float32.
    """

    @intrinsic
    def kernel(
        typing: Any, weights: Any, w_at: Any, w_row: Any, n_sums: Any, rows: Any, row: Any, n: Any, size: Any, y: Any,
        y_at: Any, y_row: Any, more: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, w_at, w_row, n_sums, rows, row, n, size, y, y_at, y_row, more = args
            weights, y = (
                element_address(context, builder, signature.args[i], array, at)
                for i, array, at in ((0, weights, w_at), (8, y, y_at))
            )
            rows, kind = builder.inttoptr(rows, _I8.as_pointer()), ir.VectorType(_F32, register_lanes())

            def element(j: Any, e: Any) -> Any:
                return read(builder, _at(builder, rows, builder.mul(j, row)), e, kind)

            def sums(count: int) -> None:
                sources, targets = _rows_of(builder, weights, w_row, count), _rows_of(builder, y, y_row, count)
                is_more = builder.icmp_signed("!=", more, ir.Constant(_I64, 0))
                most = (_SUMS_OF_WIDENED if widens else _SUMS)[register_lanes()]
                _sum_rows(builder, sources, element, n, size, targets, is_more, most)

            _switch(builder, n_sums, {
                count: partial(sums, count) for count in range(1, _VECTORS[register_lanes()] + 1)
            })  # fmt: skip
            return context.get_dummy_value()

        i = types.int64
        return types.void(weights, i, i, i, i, i, i, i, y, i, i, i), generate

    return kernel


def _sum_rows(
    builder: Any, weights: list[Any], element: Callable[[Any, Any], Any], n: Any, size: Any, targets: list[Any],
    more: Any, most: int,
) -> None:  # fmt: skip
    """Write the weighted sums of n rows; `element(j, e)` generates the load of a register of row j from element e on.

    A row is processed in groups of 8 registers, or of fewer if the sums would need more than `most` registers. The
    rest of the row is processed in groups half as large, and so on.
    """
    width, first, together = register_lanes(), ir.Constant(_I64, 0), 8
    while together > 1 and together * len(targets) > most:
        together //= 2
    while True:
        step = ir.Constant(_I64, together * width)
        stop = builder.sub(size, builder.srem(builder.sub(size, first), step))
        with cgutils.for_range_slice(builder, first, stop, step, _I64) as (e, _):
            _weighted_part(builder, weights, element, n, e, targets, together, more)
        if together * width <= LANES:  # the width of a row is a multiple of LANES
            return
        together, first = together // 2, stop


def _weighted_part(
    builder: Any, weights: list[Any], element: Callable[[Any, Any], Any], n: Any, e: Any, targets: list[Any],
    together: int, more: Any,
) -> None:  # fmt: skip
    """Sum `together` registers of all rows from element e on. If `more`, begin with the sums in the targets."""
    width = register_lanes()
    kind = ir.VectorType(_F32, width)
    sums = [_zeros(builder, kind, together) for _ in weights]
    with builder.if_then(more):
        for target, places in zip(targets, sums, strict=True):
            for i, place in enumerate(places):
                builder.store(_load(builder, _at(builder, target, e), i * width, kind), place)

    def step(j: Any) -> None:
        spread = [everywhere(builder, _load(builder, p, j, _F32), width) for p in weights]
        for i in range(together):
            values = element(j, builder.add(e, ir.Constant(_I64, i * width)))
            for weight, places in zip(spread, sums, strict=True):
                _add_product(builder, weight, values, places[i])

    _for_steps(builder, n, 1, 1, step)
    for target, places in zip(targets, sums, strict=True):
        for i, place in enumerate(places):
            _store(builder, builder.load(place), _at(builder, target, e), i * width)
