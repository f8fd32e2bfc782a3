"""Run a compiled kernel once: copy arrays to guarded buffers, run the grid, return the outputs or raise an error."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from .compiler import UNOPTIMIZED
from .errors import EmulatorError, Finding, MemoryFaultError, Place, merged, message, severity
from .memory import ALIGNMENT, Buffer, pool
from .report import Failed, Region, distance
from .runtime import Entry, Failure, Options, Statistics, printed, threadgroup_arrays, turn
from .signature import TYPES, Parameter, Signature, dtype_name

R = TypeVar("R")
_SIZES = {"bfloat16": 2}


class Memory(NamedTuple):
    """The memory of an array."""

    dtype: str  # MLX's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    origin: int  # the address of element 0
    first: int  # the lowest address of any element
    size: int  # bytes from `first` to the end of the element with the highest address
    owner: np.ndarray[Any, Any]  # keeps the memory alive
    source: Any  # the caller's array before it was copied, or the MLX array that the caller's value was converted to


def item_size(dtype: str) -> int:
    """Return the number of bytes of an element."""
    return _SIZES.get(dtype) or np.dtype(dtype).itemsize


def memory_of(array: Any, *, row_contiguous: bool) -> Memory:
    """Return the memory of an array. With `row_contiguous`, an array that is not row-contiguous is copied first."""
    # Numbers and lists are converted to MLX arrays, and so are NumPy arrays with a dtype that MLX lacks.
    if not isinstance(array, mx.array) and dtype_name(getattr(array, "dtype", None)) not in TYPES:
        array = mx.array(array)
    dtype = dtype_name(array.dtype)
    # NumPy has no bfloat16, so the view has uint16 elements.
    view = np.asarray(array.view(mx.uint16) if dtype == "bfloat16" else array)
    if row_contiguous and not view.flags.c_contiguous:
        view = np.ascontiguousarray(view)
    item = view.itemsize
    strides = tuple(stride // item for stride in view.strides)
    origin = view.ctypes.data
    if view.size == 0:
        return Memory(dtype, view.shape, strides, origin, origin, 0, view, array)
    reach = [(n - 1) * stride for n, stride in zip(view.shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return Memory(dtype, view.shape, strides, origin, origin + low * item, (high - low + 1) * item, view, array)


def output_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the number of bytes of a row-contiguous array."""
    return math.prod(shape) * item_size(dtype)


def fill(address: int, size: int, dtype: str, value: float) -> None:
    """Set every element of an array at `address` to `value`; `size` is in bytes."""
    if size:
        one = np.array(mx.array([value], dtype=_mlx_dtype(dtype)).view(mx.uint8))
        _bytes_at(address, size).reshape(-1, one.size)[:] = one


def _mlx_dtype(name: str) -> mx.Dtype:
    return getattr(mx, "bool_" if name == "bool" else name)  # type: ignore[no-any-return]


def array_at(address: int, shape: Sequence[int], dtype: str) -> mx.array:
    """Return a copy of memory as an MLX array."""
    size = output_bytes(shape, dtype)
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    values = mx.array(_bytes_at(address, size).view(kind).reshape(tuple(shape)))
    return values.view(mx.bfloat16) if dtype == "bfloat16" else values


def _bytes_at(address: int, size: int) -> np.ndarray[Any, Any]:
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


POISON = 0xFF  # the byte that fills buffers without an initial value: NaN in every floating type
# At most this number of bytes, of all outputs together, is checked for races, because the check of a byte takes 88
# bytes of memory.
_WATCHED = 8 << 20
_WIDEST = 32  # the largest alignment of a Metal type in bytes: that of `long4`
# With `Run.trace`, in an output larger than _WATCHED, this number of bytes on each side of the traced byte is checked.
_TRACED = 1024


@dataclass(frozen=True)
class Run:
    """The parameters of a run besides its arrays; see `MetalKernel.__call__`."""

    kernel: str
    texts: Mapping[str, str]  # header and body
    grid: Sequence[int]
    threadgroup: Sequence[int]
    init_value: float | None
    options: Options
    # The alignment in bytes of the start of a buffer. With 1, a buffer can end exactly where unmapped memory begins.
    alignment: int = ALIGNMENT
    trace: tuple[int, int] | None = None  # (output, byte): the last thread that wrote the byte is reported in a note


# Maps the number of a buffer to an alignment in bytes, if wide loads or stores in the buffer need more than
# `Run.alignment`.
Alignments = dict[int, int]


def until_aligned(attempt: Callable[[], R | None]) -> R:
    """Call `attempt`, which runs a kernel, until its result is not None.

    An `attempt` that returns None has added the larger alignments that the kernel needs, for the next call.
    """
    with turn:
        while True:
            with pool.lending():
                if (found := attempt()) is not None:
                    return found


def dispatch(
    run: Run,
    signature: Signature,
    entry: Entry,
    inputs: Sequence[Memory],
    shapes: Sequence[Sequence[int]],
    alignments: Alignments,
) -> tuple[list[mx.array], Statistics] | None:
    """Run the kernel; return its outputs, which have the shapes `shapes`, and statistics of the run.

    If the kernel needs larger alignments, add them to `alignments` and return None; see `misplaced`.

    Raises:
        EmulatorError: the kernel made a mistake.
    """
    placed: list[tuple[Buffer, int]] = []  # (buffer, offset of element 0 in bytes)
    for i, parameter in enumerate(signature.parameters):
        alignment = alignments.get(i, run.alignment)
        if parameter.role == "output":
            placed.append((_output(run, shapes[parameter.place], parameter.dtype, alignment), 0))
        else:
            placed.append(_input(run, parameter, inputs[parameter.place], alignment))
    buffers = [buffer for buffer, _ in placed]
    made = [(p, buffer) for p, buffer in zip(signature.parameters, buffers, strict=True) if p.role == "output"]
    outputs = [buffer for _, buffer in made]
    run.options.trace = outputs[run.trace[0]].start + run.trace[1] if run.trace else 0
    statistics, reports = entry.dispatch(
        [buffer.start + offset for buffer, offset in placed],
        run.grid,
        run.threadgroup,
        run.options,
        watched=_watched(run, outputs),
        bounds=[buffer.bounds for buffer in buffers] if run.options.races else [],
    )
    regions = _regions(signature.parameters, buffers) if reports else []
    failed = [Failed(run.texts, report, regions) for report in reports]
    if needs := misplaced(failed, dict(enumerate(buffers))):
        alignments |= needs
        return None
    print(printed(), end="")  # noqa: T201 - the kernel's own log
    raise_mistakes(run.kernel, failed, [(p.name, buffer) for p, buffer in made])
    note(statistics, failed)
    return [array_at(buffer.start, shapes[p.place], p.dtype) for p, buffer in made], statistics


def misplaced(failed: Sequence[Failed], buffers: Mapping[int, Buffer]) -> Alignments:
    """Return larger alignments for buffers in which a load or store was misaligned because the buffer's start is.

    If a buffer ends exactly at unmapped memory, its start may be misaligned. A misaligned load or store in such a
    buffer is not the kernel's mistake, because MLX aligns the start of its buffers for every type.
    """
    needs: Alignments = {}
    for one in failed:
        wanted, address = one.report.count, one.report.address
        if one.kind is Failure.FAULT and not wanted and not address:
            # clang does not check whether a copy of a structure is aligned. A misaligned copy faults, and x86 does not
            # report the address of this fault.
            needs |= {i: _WIDEST for i, buffer in buffers.items() if buffer.start % _WIDEST}
        if one.kind is not Failure.UNDEFINED or not wanted or not buffers:
            continue
        i = min(buffers, key=lambda i: distance(buffers[i], address))
        if buffers[i].start % wanted:
            needs[i] = max(wanted, needs.get(i, 0))
    return needs


def _watched(run: Run, outputs: Sequence[Buffer]) -> list[tuple[int, int, bool]]:
    """Return the parts of the outputs that are checked for races: (address, bytes, whether they are uninitialised)."""
    if not run.options.races:
        return []
    if run.trace is not None:
        return [around(outputs[run.trace[0]], run.trace[1])]
    most = _WATCHED // max(1, len(outputs))
    return [(buffer.start, min(buffer.bytes, most), run.init_value is None) for buffer in outputs]


def around(buffer: Buffer, byte: int) -> tuple[int, int, bool]:
    """Return the part of a buffer that is checked to trace one byte, as an item of the result of `_watched`."""
    if buffer.bytes <= _WATCHED:
        return buffer.start, buffer.bytes, False
    first = max(0, byte - _TRACED)
    return buffer.start + first, min(buffer.bytes, byte + _TRACED) - first, False


def _output(run: Run, shape: Sequence[int], dtype: str, alignment: int) -> Buffer:
    size = output_bytes(shape, dtype)
    buffer = pool.writable(size, at_end=bool(run.options.at_end), alignment=alignment)
    if run.init_value is None:
        ctypes.memset(buffer.start, POISON, size)
    else:
        fill(buffer.start, size, dtype, run.init_value)
    return buffer


def _input(run: Run, parameter: Parameter, memory: Memory, alignment: int) -> tuple[Buffer, int]:
    """Return a buffer with an input (or with its shape, strides or ndim), and the offset of element 0 in bytes."""
    at_end = bool(run.options.at_end)
    if parameter.role == "input":
        buffer = pool.readable(memory.first, memory.size, memory.source, at_end=at_end, alignment=alignment)
        return buffer, memory.origin - memory.first
    if parameter.role == "strides":
        numbers = np.array(memory.strides, np.int64)
    else:
        numbers = np.array(memory.shape if parameter.role == "shape" else [len(memory.shape)], np.int32)
    return pool.readable(numbers.ctypes.data, numbers.nbytes, at_end=at_end, alignment=alignment), 0


def _regions(parameters: Sequence[Parameter], buffers: Sequence[Buffer]) -> list[Region]:
    regions = []
    for parameter, buffer in zip(parameters, buffers, strict=True):
        is_output = parameter.role == "output"
        name = f"{'output' if is_output else 'input'} '{parameter.name}'"
        item = item_size(parameter.dtype) if is_output else 1
        regions.append(Region(name, buffer.start, buffer.bytes, read_only=not is_output, item=item))
    return [*regions, *threadgroup_regions()]


def threadgroup_regions() -> list[Region]:
    """Return the threadgroup arrays of the last dispatch."""
    return [Region(f"threadgroup array '{of.name.decode()}'", of.start, of.bytes) for of in threadgroup_arrays()]


def note(statistics: Statistics, failed: Sequence[Failed]) -> None:
    """Add the notes (possible mistakes) of a run to the run's statistics."""
    shifted = [one.undefined for one in failed if one.kind is Failure.SHIFTED]
    writers = [one.finding for one in failed if one.kind is Failure.WRITER]
    others = [one.finding for one in failed if one.kind not in (Failure.SHIFTED, Failure.WRITER)]
    statistics.notes = merged(others)
    statistics.undefined = shifted[0] if shifted else None
    statistics.writer = writers[0] if writers else None


# Maps kinds of failures to values of `MemoryFaultError.seen`. All other kinds have the value "at once".
_SEEN: dict[Failure, Literal["afterwards", "exactly"]] = {
    Failure.THREADGROUP_CANARY: "afterwards",
    Failure.BOUNDS: "exactly",
}


def raise_mistakes(kernel: str, failed: Sequence[Failed], outputs: Sequence[tuple[str, Buffer]]) -> None:
    """Raise an error if there are mistakes; the most severe one determines the error's class and begins its message."""
    wrong = [one for one in failed if not one.kind.is_note]
    wrong.sort(key=lambda one: severity(one.finding))
    found = [one.finding for one in wrong]
    classes: list[type[EmulatorError]] = [one.error_class for one in wrong]
    for name, buffer in outputs:
        if (offset := buffer.damaged()) is not None:
            found.append(_damage(name, buffer, offset))
            classes.append(MemoryFaultError)
    if found:
        every = merged(found)
        error = classes[0](message(kernel, every))
        error.findings = every
        if isinstance(error, MemoryFaultError):
            first = wrong[0].kind if wrong else Failure.THREADGROUP_CANARY
            error.seen = _SEEN.get(first, "at once")
        raise error


def located(fault: MemoryFaultError, repeat: Callable[[str], object]) -> MemoryFaultError:
    """Repeat a run that has faulted, to find the exact line. Return the new fault, or `fault` if there is none.

    If the fault was seen "afterwards", repeat the run in the build "races", which checks every access. If it was seen
    "at once", repeat the run in the build without optimisation, so that the line is the same on all machines. A fault
    that was seen "exactly" is returned as it is. `repeat` runs the kernel in the build with the given name, without
    `Run.trace`.
    """
    if fault.seen == "exactly":
        return fault
    late = fault.seen == "afterwards"
    try:
        repeat("races" if late else UNOPTIMIZED.name)
    except MemoryFaultError as again:
        return again
    except EmulatorError:
        pass
    return fault


def _damage(name: str, buffer: Buffer, offset: int) -> Finding:
    """Return the finding for a write outside of an output, `offset` bytes after the output's start."""
    where = f"{-offset:,} bytes before its start" if offset < 0 else f"{offset - buffer.bytes:,} bytes past its end"
    if offset == buffer.bytes:
        where = "just past its end"
    text = f"wrote to output '{name}' ({buffer.bytes:,} bytes), {where}\ncheck the index, or guard it"
    return Finding("fault", False, text, Place((0, 0, 0), (0, 0, 0), None, 0))
