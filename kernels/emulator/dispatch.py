"""Run a compiled kernel once: fill buffers, run the grid, return arrays or raise an error."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kernels.emulator.arrays import Memory, array_at, fill, output_bytes
from kernels.emulator.errors import EmulatorError, MemoryFaultError
from kernels.emulator.findings import Finding, Place, merged, message
from kernels.emulator.memory import Buffer, pool
from kernels.emulator.report import Failed, Region
from kernels.emulator.runtime import Entry, Failure, Options, Statistics, printed, threadgroup_arrays, turn
from kernels.emulator.signature import Parameter, Signature

_POISON = 0xFF  # NaN in every floating type
# Bytes of outputs that are checked for races; each takes 88 bytes of memory.
_WATCHED = 8 << 20
# Bytes on each side of a traced one: a wide store begins before it.
_TRACED = 1024


@dataclass(frozen=True)
class Run:
    """The parameters of a run besides its arrays; see `MetalKernel.__call__`."""

    kernel: str
    texts: Mapping[str, str]  # header and body
    grid: Sequence[int]
    threadgroup: Sequence[int]
    init_value: float | None
    seed: int
    all_lanes: bool
    at_end: bool
    races: bool
    poison: int
    time_limit: float
    print_from: Sequence[int]
    trace: tuple[int, int] | None = None  # an output and a byte of it, whose last writer is noted


def dispatch(
    run: Run, signature: Signature, entry: Entry, inputs: Sequence[Memory], shapes: Sequence[Sequence[int]]
) -> tuple[list[mx.array], Statistics]:
    """Run the kernel and return its outputs, with these shapes.

    Raises:
        EmulatorError: the kernel made a mistake.
    """
    produced = [parameter for parameter in signature.parameters if parameter.role == "output"]
    with turn, pool.lending():
        outputs = [_output(run, shape, parameter.dtype) for parameter, shape in zip(produced, shapes, strict=True)]
        buffers, addresses = [], []
        for parameter in signature.parameters:
            if parameter.role == "output":
                buffer, offset = outputs[parameter.place], 0
            else:
                buffer, offset = _input(run, parameter, inputs[parameter.place])
            buffers.append(buffer)
            addresses.append(buffer.start + offset)
        statistics, reports = entry.dispatch(
            addresses,
            run.grid,
            run.threadgroup,
            _options(run, outputs),
            watched=_watched(run, outputs),
        )
        print(printed(), end="")  # noqa: T201 - of the kernel's own log
        regions = _regions(signature.parameters, buffers) if reports else []
        failed = [Failed(run.texts, report, regions) for report in reports]
        raise_mistakes(run.kernel, failed, [(p.name, buffer) for p, buffer in zip(produced, outputs, strict=True)])
        note(statistics, failed)
        arrays = [
            array_at(buffer.start, shape, parameter.dtype)
            for parameter, buffer, shape in zip(produced, outputs, shapes, strict=True)
        ]
    return arrays, statistics


def _watched(run: Run, outputs: Sequence[Buffer]) -> list[tuple[int, int, bool]]:
    """Return the parts of the outputs that are checked for races."""
    if not run.races:
        return []
    if run.trace is not None:
        return [around(outputs[run.trace[0]], run.trace[1])]
    most = _WATCHED // max(1, len(outputs))
    return [(buffer.start, min(buffer.bytes, most), run.init_value is None) for buffer in outputs]


def around(buffer: Buffer, byte: int) -> tuple[int, int, bool]:
    """Return the memory that is watched to find which thread wrote a byte, or the one next to it."""
    first, end = byte - _TRACED, byte + _TRACED
    if buffer.bytes <= _WATCHED:
        first, end = min(first, 0), max(end, buffer.bytes)
    return buffer.start + first, end - first, False


def _options(run: Run, outputs: Sequence[Buffer]) -> Options:
    patience, place = int(run.time_limit * 1000), (ctypes.c_uint * 3)(*run.print_from)
    trace = outputs[run.trace[0]].start + run.trace[1] if run.trace else 0
    return Options(run.seed, run.all_lanes, run.races, run.at_end, run.poison, patience, place, trace)


def _output(run: Run, shape: Sequence[int], dtype: str) -> Buffer:
    size = output_bytes(shape, dtype)
    buffer = pool.writable(size, at_end=run.at_end)
    if run.init_value is None:
        ctypes.memset(buffer.start, _POISON, size)
    else:
        fill(buffer.start, size, dtype, run.init_value)
    return buffer


def _input(run: Run, parameter: Parameter, memory: Memory) -> tuple[Buffer, int]:
    """Return a buffer with an input, or with its shape, strides or ndim, and the offset of element 0."""
    if parameter.role == "input":
        buffer = pool.readable(memory.first, memory.size, memory.source, at_end=run.at_end)
        return buffer, memory.origin - memory.first
    if parameter.role == "strides":
        told = np.array(memory.strides, np.int64)
    else:
        told = np.array(memory.shape if parameter.role == "shape" else [len(memory.shape)], np.int32)
    return pool.readable(told.ctypes.data, told.nbytes, at_end=run.at_end, alignment=told.itemsize), 0


def _regions(parameters: Sequence[Parameter], buffers: Sequence[Buffer]) -> list[Region]:
    regions = []
    for parameter, buffer in zip(parameters, buffers, strict=True):
        is_output = parameter.role == "output"
        name = f"{'output' if is_output else 'input'} '{parameter.name}'"
        regions.append(Region(name, buffer.start, buffer.bytes, read_only=not is_output))
    for array in threadgroup_arrays():
        regions.append(Region(f"threadgroup array '{array.name.decode()}'", array.start, array.bytes))
    return regions


def note(statistics: Statistics, failed: Sequence[Failed]) -> None:
    """Add the notes of a run to its statistics."""
    shifted = [one.undefined for one in failed if one.kind is Failure.SHIFTED]
    writers = [one.finding for one in failed if one.kind is Failure.WRITER]
    others = [one.finding for one in failed if one.kind not in (Failure.SHIFTED, Failure.WRITER)]
    statistics.notes = merged(others)
    statistics.undefined = shifted[0] if shifted else None
    statistics.writer = writers[0] if writers else None


def raise_mistakes(kernel: str, failed: Sequence[Failed], outputs: Sequence[tuple[str, Buffer]]) -> None:
    """Raise an error with all mistakes, the class of which is the first one's."""
    wrong = [one for one in failed if not one.kind.is_note]
    found = [one.finding for one in wrong]
    classes: list[type[EmulatorError]] = [one.error_class for one in wrong]
    damaged = [(i, offset) for i, (_, buffer) in enumerate(outputs) if (offset := buffer.damaged()) is not None]
    for i, offset in damaged:
        found.append(_damage(*outputs[i], offset, failed))
        classes.append(MemoryFaultError)
    if found:
        every = merged(found)
        error = classes[0](message(kernel, every))
        error.findings = every
        if isinstance(error, MemoryFaultError) and not wrong:
            error.damaged = damaged[0]
        raise error


def _damage(name: str, buffer: Buffer, offset: int, failed: Sequence[Failed]) -> Finding:
    """Return the finding for a byte around an output that has changed, with its writer if that was traced."""
    where = f"{-offset:,} bytes before its start" if offset < 0 else f"{offset - buffer.bytes:,} bytes past its end"
    if offset == buffer.bytes:
        where = "just past its end"
    lines, place = [f"wrote to output '{name}' ({buffer.bytes:,} bytes), {where}"], Place((0, 0, 0), (0, 0, 0), None, 0)
    for one in failed:
        if one.kind is Failure.WRITER and one.report.count == 1 and one.report.address == buffer.start + offset:
            lines[0] += f", at {one.line_of(one.report.code - 1)}"
            lines.append(one.thread)
            place = one.finding.place
    return Finding("fault", False, "\n".join([*lines, "check the index, or guard it"]), place)
