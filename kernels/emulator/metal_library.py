"""Run the kernels of complete .metal files on the CPU. The function `library` reads such a file."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import lint
from .compiler import BUILDS, UNOPTIMIZED, Build, check_syntax, kernel_library, uses_tensors
from .dispatch import (
    POISON,
    Alignments,
    around,
    array_at,
    located,
    memory_of,
    misplaced,
    note,
    output_bytes,
    raise_mistakes,
    threadgroup_regions,
    until_aligned,
)
from .errors import CompileError, Finding, LaunchError, LintError, MemoryFaultError, Place
from .kernel import TIME_LIMIT, check_grid, check_switches, options_of
from .memory import ALIGNMENT, Buffer, pool
from .metal_text import MetalFunction, MetalParameter, MetalText, read_metal
from .report import Failed, Region
from .runtime import Entry, Options, Statistics
from .signature import TYPES, dtype_name
from .source import attributes, place_threadgroup_memory
from .text import casts_pointers, with_suffixes

# ---- convert arrays, structures and numbers to the bytes of buffers, and bytes back to arrays ----

# Maps Metal types to NumPy types. For parameters of these types, the caller may pass a Python number.
_SCALARS = {metal: dtype for dtype, metal in TYPES.items() if dtype not in ("bfloat16", "complex64")} | {
    **{"half": "float16", "char": "int8", "uchar": "uint8", "short": "int16", "ushort": "uint16", "int": "int32"},
    **{"uint": "uint32", "long": "int64", "ulong": "uint64", "size_t": "uint64", "unsigned int": "uint32"},
}


@dataclass(frozen=True)
class Unwritten:
    """A buffer for an output of a kernel. Before the kernel runs, floats in it are NaN."""

    shape: Sequence[int]
    dtype: Any  # a dtype of MLX or NumPy; a NumPy dtype may be structured


@dataclass(frozen=True)
class Contents:
    """The contents of a buffer."""

    size: int  # in bytes
    bytes: NDArray[np.uint8] | None  # None if the buffer has no value yet
    like: Any  # the value that the caller passed

    @property
    def item(self) -> int:
        """The bytes of one element; 1 if the value has no shape."""
        shape = getattr(self.like, "shape", None)
        return max(1, self.size // max(1, math.prod(shape))) if shape is not None else 1

    def is_same(self, other: Contents) -> bool:
        """Return whether the caller passed one array for both parameters, which then share a buffer."""
        return self.like is other.like and isinstance(self.like, mx.array | np.ndarray | Unwritten | bytearray)

    def array(self, address: int) -> Any:
        """Return a copy of the memory at an address: an array with the shape and dtype of `like`, or else bytes."""
        if isinstance(self.like, mx.array | Unwritten) and dtype_name(self.like.dtype) in TYPES:
            found = array_at(address, self.like.shape, dtype_name(self.like.dtype))
            return found if isinstance(self.like.dtype, mx.Dtype) else np.array(found)
        data = ctypes.string_at(address, self.size)
        if isinstance(self.like, Unwritten | np.ndarray | np.generic):
            return np.frombuffer(data, self.like.dtype).reshape(tuple(self.like.shape)).copy()
        return data


def contents(kernel: str, parameter: MetalParameter, value: Any) -> Contents:
    """Convert a value that the caller passed to the contents of a buffer.

    Raises:
        LaunchError: a value of this type cannot be passed for the parameter.
    """
    if isinstance(value, Unwritten):
        if dtype_name(value.dtype) in TYPES:
            return Contents(output_bytes(value.shape, dtype_name(value.dtype)), None, value)
        return Contents(int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize, None, value)
    if isinstance(value, bytes | bytearray):
        return _filled(np.frombuffer(bytes(value), np.uint8), value)
    if isinstance(value, mx.array):
        return _filled(memory_of(value, row_contiguous=True).owner, value)
    if isinstance(value, np.ndarray | np.generic):
        return _filled(np.asarray(value), value)
    if isinstance(value, int | float) and parameter.type in _SCALARS:
        return _filled(np.array([value], _SCALARS[parameter.type]), value)
    raise LaunchError(
        f"kernel '{kernel}', buffer {parameter.slot} ('{parameter.name}', {parameter.type}): expected an array of MLX "
        f"or NumPy, bytes, Unwritten(shape, dtype) or, for a parameter of a simple type, a number; found {value!r}"
    )


def _filled(array: NDArray[Any], like: Any) -> Contents:
    data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return Contents(data.size, data, like)


# With MSL_FLAT, all address spaces are one memory.
_FLAGS = ("-DMSL_FLAT", "-Xclang", "-cl-single-precision-constant", "-Wno-double-promotion")


# The contents of a reference or an optional parameter if the caller passed None: 0 bytes, so that any access faults.
_ABSENT = Contents(0, np.empty(0, np.uint8), b"")


def library(source: str | Path, include: Sequence[str | Path] = ()) -> Library:
    """Return the kernels of a complete .metal file for the emulator.

    Args:
        source: the path or the text of a .metal file.
        include: folders to search for included files, after the folder of the .metal file.

    Raises:
        CompileError: the file cannot be preprocessed, or has no kernels.
    """
    folders = [Path(folder) for folder in include]
    if isinstance(source, Path) or ("\n" not in source and source.endswith(".metal")):
        file = Path(source)
        return Library(file.name, read_metal(file, file.read_text(encoding="utf-8", errors="replace"), folders))
    return Library("metal", read_metal(None, source, folders))


class Library:
    """The kernels of a .metal file; see `library`."""

    def __init__(self, name: str, text: MetalText) -> None:
        self.name = name
        self._text = text

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kernels: their `host_name` or, without one, the name of the function."""
        return tuple(self._text.functions)

    def template_of(self, name: str) -> str:
        """Return the name of a kernel's function or function template, without template arguments."""
        return self._text.functions[name].function.partition("<")[0]

    def function(self, name: str, constants: Mapping[int | str, float] | None = None) -> WholeKernel:
        """Return the kernel `name`, with the given values of function constants.

        Args:
            name: one of `names`.
            constants: values by index or name. Every constant that the kernel uses is required, unless the kernel tests
                it with `is_function_constant_defined`.

        Raises:
            LaunchError: there is no such kernel, or no such constant.
        """
        found = self._text.functions.get(name)
        if found is None:
            near = [one for one in self.names if name[:8] in one][:8] or list(self.names)[:8]
            raise LaunchError(f"{self.name}: expected a kernel such as {', '.join(near)}; found '{name}'")
        values: dict[int, str] = {}
        for key, value in (constants or {}).items():
            index = next((one.index for one in self._text.constants if key in (one.index, one.name)), None)
            if index is None:
                known = ", ".join(f"{one.index} ({one.name})" for one in self._text.constants) or "none"
                raise LaunchError(f"{self.name}, function constant {key!r}: expected one of {known}")
            values[index] = str(value).lower() if isinstance(value, bool) else repr(value)
        return WholeKernel(self.name, self._text, found, values)

    def prepare(self, kernels: Sequence[WholeKernel], build: str = "spaces") -> None:
        """Compile kernels of this file as one translation unit, which is faster than one unit per kernel.

        The kernels must have the same function constants.

        Raises:
            CompileError: a kernel does not compile.
        """
        file = compile_together(kernels, build)
        for i, kernel in enumerate(kernels):
            kernel.use(build, Entry(file, i))


@dataclass(frozen=True)
class _Run:
    grid: Sequence[int]
    threadgroup: Sequence[int]
    options: Options
    build: str
    trace: tuple[int, int] | None = None


class WholeKernel:
    """A kernel of a .metal file; see `Library.function`.

    Attributes:
        statistics: statistics of the last call; None before the first.
    """

    def __init__(self, file: str, text: MetalText, function: MetalFunction, constants: dict[int, str]) -> None:
        self.statistics: Statistics | None = None
        self._file, self._text, self._function, self._constants = file, text, function, constants
        self._entries: dict[str, Entry] = {}
        self._alignments: Alignments = {}

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._function.name

    @property
    def parameters(self) -> tuple[MetalParameter, ...]:
        """The kernel's parameters: buffers, threadgroup memory and attributes."""
        return self._function.parameters

    def __call__(
        self,
        buffers: Sequence[Any] | Mapping[int, Any],
        *,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        threadgroup_memory: Mapping[int, int] | None = None,
        seed: int = 0,
        build: str = "spaces",
        lanes: str = "active",
        guard: str | None = None,
        time_limit: float = TIME_LIMIT,
        trace: tuple[int, int] | None = None,
        layout: str = "any",
    ) -> dict[int, Any]:
        """Run the kernel over the grid. `MetalKernel.__call__` describes the values of the options from `seed` on.

        Args:
            buffers: buffers by index: arrays of MLX or NumPy (also structured ones), bytes of structures, numbers for
                parameters of a simple type, `Unwritten(shape, dtype)` for outputs, None for a buffer that the kernel
                does not use.
            grid: total threads (not threadgroups) per axis.
            threadgroup: threads per axis of a threadgroup; at most 1,024 in all.
            threadgroup_memory: {n: bytes} for parameters with `[[threadgroup(n)]]`.
            seed: selects the order of threads.
            build: which checks are made: "spaces", "undefined" or "races".
            lanes: which lanes must reach SIMD-group operations: "active" or "all".
            guard: which side of buffers is next to unmapped memory: "end" or "start"; None lets the seed choose.
            time_limit: seconds of CPU time that a threadgroup may take.
            trace: (index of a buffer, offset of a byte). In the build "races", `statistics.writer` then names the last
                thread that wrote this byte.
            layout: which thread has which element of a cooperative tensor: "any" or "m5".

        Returns:
            {index: contents} for each buffer that the kernel may write to. The contents are an array of MLX or
            NumPy with the argument's shape and dtype, or bytes if the argument was bytes, a bytearray or a number.

        Raises:
            EmulatorError: the kernel or its call is wrong; see `errors`.
        """
        where = f"kernel '{self.name}'"
        check_switches(where, seed, build, lanes, guard, layout)
        check_grid(where, grid, threadgroup)
        run = _Run(grid, threadgroup, options_of(seed, build, lanes, guard, time_limit, layout), build, trace)
        given = self._given(dict(buffers) if isinstance(buffers, Mapping) else dict(enumerate(buffers)))
        sizes = self._sizes(threadgroup_memory or {})
        try:
            return self._dispatch(run, given, sizes)
        except MemoryFaultError as fault:

            def repeat(build: str) -> None:
                run.options.races, run.options.trace = build == "races", 0
                self._dispatch(replace(run, build=build, trace=None), given, sizes)

            raise located(fault, repeat) from None

    def _given(self, buffers: dict[int, Any]) -> dict[int, Contents | None]:
        wanted = {one.slot: one for one in self.parameters if one.role == "buffer"}
        if missing := [f"{i} ('{one.name}')" for i, one in wanted.items() if i not in buffers]:
            raise LaunchError(f"kernel '{self.name}', buffers: expected also {', '.join(missing)}; pass None if unused")
        return {i: None if buffers[i] is None else contents(self.name, one, buffers[i]) for i, one in wanted.items()}

    def _sizes(self, given: Mapping[int, int]) -> dict[int, int]:
        wanted = {one.slot: one for one in self.parameters if one.role == "threadgroup"}
        if missing := [f"{i} ('{one.name}')" for i, one in wanted.items() if i not in given]:
            raise LaunchError(f"kernel '{self.name}', threadgroup_memory: expected bytes also of {', '.join(missing)}")
        return {i: given[i] for i in wanted}

    def _dispatch(self, run: _Run, given: dict[int, Contents | None], sizes: dict[int, int]) -> dict[int, Any]:
        return until_aligned(partial(self._dispatched, self._compiled(run.build), run, given, sizes))

    def _dispatched(
        self, entry: Entry, run: _Run, given: dict[int, Contents | None], sizes: dict[int, int]
    ) -> dict[int, Any] | None:
        """Run the kernel; return the contents of each buffer that the kernel may write to.

        If the kernel needs larger alignments, add them to `_alignments` and return None.
        """
        placed = self._place(given, run.options)
        shapes = {one.slot: self._shape(one, given[one.slot]) for one in self.parameters if one.is_tensor}
        addresses = []
        for one in self.parameters:
            if one.role == "threadgroup":
                addresses.append(sizes[one.slot])
            elif one.role == "buffer":
                addresses.append(placed[one.slot].start if one.slot in placed else 0)
            if one.is_tensor:
                addresses.append(ctypes.addressof(shapes[one.slot]))
        written = [(i, value, placed[i]) for i, value in given.items() if value is not None and self._writes(i)]
        watched = [(buffer.start, buffer.bytes, value.bytes is None) for _, value, buffer in written]
        if run.trace is not None:
            index, byte = run.trace
            watched = [around(buffer, byte) for i, _, buffer in written if i == index]
            run.options.trace = placed[index].start + byte if watched else 0
        statistics, reports = entry.dispatch(
            addresses,
            run.grid,
            run.threadgroup,
            run.options,
            watched=watched if run.options.races else [],
            bounds=[buffer.bounds for buffer in placed.values()] if run.options.races else [],
        )
        failed = [Failed(self._text.sources, report, self._regions(placed, given)) for report in reports]
        if needs := misplaced(failed, placed):
            self._alignments |= needs
            return None
        raise_mistakes(self.name, failed, [(self._label(i), buffer) for i, _, buffer in written])
        note(statistics, failed)
        self.statistics = statistics
        return {i: value.array(buffer.start) for i, value, buffer in written}

    def _shape(self, one: MetalParameter, value: Contents | None) -> Any:
        """Return a C array: the number of axes, then the extents, last axis first, as in Metal's tensors."""
        shape = getattr(value.like, "shape", None) if value is not None else None
        if not shape:
            raise LaunchError(
                f"kernel '{self.name}', buffer {one.slot} ('{one.name}', a tensor): expected an array of one axis or "
                f"more, found {value.like if value is not None else None!r}"
            )
        return (ctypes.c_long * (1 + len(shape)))(len(shape), *reversed([int(n) for n in shape]))

    def _place(self, given: Mapping[int, Contents | None], options: Options) -> dict[int, Buffer]:
        """Return {index: buffer}. If an array was passed for several parameters, they share a buffer."""
        placed: dict[int, Buffer] = {}
        for one in self.parameters:
            if one.role != "buffer" or one.slot in placed:
                continue
            value = given[one.slot]
            if value is None and not (one.is_reference or one.is_optional):
                continue  # a null pointer, which a kernel may compare with nullptr
            same = [i for i, other in given.items() if value is not None and other is not None and other.is_same(value)]
            if shared := next((placed[i] for i in same if i in placed), None):
                placed[one.slot] = shared
            else:
                is_written = any(self._writes(i) for i in (one.slot, *same))
                needed = [self._alignments[i] for i in (one.slot, *same) if i in self._alignments]
                alignment = max(needed, default=ALIGNMENT if options.races or casts_pointers(self._text.code) else 1)
                placed[one.slot] = _placed(
                    value or _ABSENT, at_end=bool(options.at_end), alignment=alignment, is_written=is_written
                )
        return placed

    def _writes(self, index: int) -> bool:
        return any(one.is_written for one in self.parameters if one.role == "buffer" and one.slot == index)

    def _label(self, index: int) -> str:
        return next(one.name for one in self.parameters if one.role == "buffer" and one.slot == index)

    def _regions(self, placed: Mapping[int, Buffer], given: Mapping[int, Contents | None]) -> list[Region]:
        regions = []
        for i, buffer in placed.items():
            name, value = f"buffer {i} '{self._label(i)}'", given[i]
            item = value.item if value is not None else 1
            regions.append(Region(name, buffer.start, buffer.bytes, read_only=not self._writes(i), item=item))
        return [*regions, *threadgroup_regions()]

    # ---- compiling ----

    def _compiled(self, build: str) -> Entry:
        if build not in self._entries:
            try:
                file = compile_together([self], build)
            except CompileError as error:
                raise CompileError(f"kernel '{self.name}' of {self._file} does not compile\n{error}") from None
            try:
                self._entries[build] = Entry(file, 0)
            except OSError as error:
                raise self._unset(str(error)) from None
        return self._entries[build]

    def use(self, build: str, entry: Entry) -> None:
        """Use `entry` for calls in this build. `Library.prepare` compiles it together with other kernels."""
        self._entries[build] = entry

    def _unset(self, error: str) -> LaunchError:
        """Return the error for an undefined symbol, which is usually a function constant without a value."""
        symbol = re.search(r"undefined symbol: (\w+)", error)
        for one in self._text.constants:
            if symbol and one.name in symbol[1]:
                return LaunchError(
                    f"kernel '{self.name}' uses function constant {one.index} ('{one.name}', {one.type}), which has no "
                    f"value; pass constants={{{one.index}: ...}}"
                )
        return LaunchError(f"kernel '{self.name}' of {self._file} uses an undefined symbol: {error}")

    def entry(self, index: int) -> str:
        """Return the text of the entry point `msl_entry_INDEX`: a C function that calls the kernel."""
        arguments, place, memory = [], 0, 0
        for one in self.parameters:
            if one.role == "attribute":
                arguments.append(f"msl_give(msl_attribute::{one.attribute}(*self, *self->group))")
                continue
            value = f"buffers[{place}]"
            if one.role == "threadgroup":
                ordinal = self._function.arrays + memory
                value = f'msl_threadgroup_array({ordinal}, (unsigned)(unsigned long){value}, "{one.name}", 0)'
                memory += 1
            if one.is_tensor:
                arguments.append(f"msl_bound_tensor{{buffers[{place}], (const long*)buffers[{place + 1}]}}")
                place += 2
                continue
            kind = one.declared.rstrip("&") + "*" if one.is_reference else one.declared
            if self._function.is_typed:
                arguments.append(f"{'*' if one.is_reference else ''}(({kind}){value})")
            else:
                arguments.append(f"msl_{'reference' if one.is_reference else 'pointer'}{{{value}}}")
            place += 1
        # If the file instantiates a template without template arguments (`is_typed`), C++ deduces these from the types
        # of the call's arguments. All other kernels are called through a function pointer, which prevents deduction.
        function, pointed = self._function.function, ""
        if not self._function.is_typed:
            pointed, function = f"  decltype({function})* msl_function = {function};\n", "msl_function"
        return (
            f'#line 1 "entry"\nextern "C" __attribute__((visibility("default")))\n'
            f"void msl_entry_{index}(void* const* buffers, const msl_thread* self) {{\n"
            f"{pointed}  {function}({', '.join(arguments)});\n}}\n"
        )

    def code(self) -> str:
        """Return the preprocessed text of the file, with the values of function constants."""
        return self._text.with_constants(self._constants)


def compile_together(kernels: Sequence[WholeKernel], build: str) -> Path:
    """Return the path of the compiled library of several kernels of one file; compile it if it is not cached.

    Raises:
        CompileError: clang reports errors.
    """
    base = BUILDS.get(build, UNOPTIMIZED)
    entries = "".join(kernel.entry(i) for i, kernel in enumerate(kernels))
    code = kernels[0].code()
    header = "msl/tensors.h" if uses_tensors(code) else "msl/all.h"
    text = f"#include <{header}>\n{attributes()}#include <msl/whole.h>\n{code}\n{entries}"
    return kernel_library(text, Build(base.name, (*base.flags, *_FLAGS)))


def _placed(value: Contents, *, at_end: bool, alignment: int, is_written: bool) -> Buffer:
    if value.bytes is not None and not is_written:
        return pool.readable(value.bytes.ctypes.data, value.size, value, at_end=at_end, alignment=alignment)
    buffer = pool.writable(value.size, at_end=at_end, alignment=alignment)
    if value.bytes is None:
        ctypes.memset(buffer.start, POISON, value.size)
    else:
        ctypes.memmove(buffer.start, value.bytes.ctypes.data, value.size)
    return buffer


# ---- compile the kernels of a file in every build, without running them ----

_SPACE = re.compile(r"address space|__(?:local|global|constant)\b")  # the words for address spaces in clang's errors


@dataclass(frozen=True)
class CompiledKernel:
    """The result of compiling a kernel function, or the first instantiation of a template of kernel functions."""

    name: str
    others: tuple[str, ...] = ()  # the names of the template's other instantiations
    error: str = ""  # clang's errors; empty if the kernel compiles in every build


def compile_metal_file(file: Path, folders: Sequence[Path] = ()) -> list[CompiledKernel]:
    """Compile the first instantiation of every kernel function of a file in every build.

    Args:
        file: the file. Its folder is searched for files of `#include "..."`.
        folders: further folders to search for included files.

    Raises:
        CompileError: the file cannot be preprocessed, has no kernels, breaks a rule of `lint`, or all its kernels fail
            to compile with the same error.
    """
    try:
        lint.check(file.name, "", file.read_text(encoding="utf-8", errors="replace"), suffixes=False)
    except LintError as error:
        text = str(error).replace(f"kernel '{file.name}'", str(file)).replace("body, line", f"{file.name}, line")
        raise LintError(text) from None
    kernels = library(file, folders)
    names: dict[str, list[str]] = {}
    for name in kernels.names:
        names.setdefault(kernels.template_of(name), []).append(name)
    errors = dict.fromkeys(names, "")
    for build in BUILDS:
        right = {template: kernels.function(its[0]) for template, its in names.items() if not errors[template]}
        errors |= _errors(right, build)
        if all(errors.values()) and len(set(errors.values())) == 1:
            raise CompileError(f"{file} {next(iter(errors.values()))}")
    return [CompiledKernel(its[0], tuple(its[1:]), errors[template]) for template, its in names.items()]


def _errors(kernels: dict[str, WholeKernel], build: str) -> dict[str, str]:
    """Return {key in `kernels`: error} for each kernel that does not compile.

    Compile all kernels as one unit first, which is faster. If this fails, compile each kernel alone.
    """
    try:
        if kernels:
            compile_together(list(kernels.values()), build)
    except CompileError as error:
        if len(kernels) == 1:
            return dict.fromkeys(kernels, f"does not compile in the build '{build}'\n{error}")
        found: dict[str, str] = {}
        for template, kernel in kernels.items():
            found |= _errors({template: kernel}, build)
        return found
    return {}


def address_space_notes(file: Path, folders: Sequence[Path] = ()) -> tuple[Finding, ...]:
    """Return a note for each error about address spaces that clang reports in a file.

    The kernels of a .metal file run with one memory for all address spaces, so a run cannot find these errors. This
    function only compiles the file, with separate address spaces. The errors become notes, not mistakes, because clang
    also refuses valid code: calls of a member function of an object outside the address space `thread`.
    """
    text = place_threadgroup_memory(file.read_text(encoding="utf-8", errors="replace"))
    head = f'#include <msl/all.h>\n#line 1 "{file.name}"\n'
    try:
        check_syntax(f"{head}{with_suffixes(text)}\n", [file.resolve().parent, *folders])
    except CompileError as error:
        lines = re.findall(rf"^{re.escape(file.name)}:(\d+):\d+: error: (.*)", str(error), re.MULTILINE)
        wrong = [(int(line), what) for line, what in lines if _SPACE.search(what)]
        return tuple(_note(file.name, *one) for one in wrong)
    return ()


def _note(file: str, line: int, what: str) -> Finding:
    for opencl, metal in (("__local", "threadgroup"), ("__global", "device"), ("__constant", "constant")):
        what = what.replace(opencl, metal)
    advice = "check the pointer's address space: Metal does not convert between address spaces"
    return Finding(
        "address space", True, f"{file}, line {line}: {what}\n{advice}", Place((0, 0, 0), (0, 0, 0), file, line)
    )
