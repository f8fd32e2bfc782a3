"""`metal_kernel`: make kernels with the interface of `mx.fast.metal_kernel` that run in the emulator, on the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from . import lint
from .compiler import BUILDS, QUICK, RACES, SPACES, UNOPTIMIZED, calls_of, kernel_library
from .dispatch import Alignments, Memory, Run, dispatch, located, memory_of, until_aligned
from .errors import CompileError, Finding, LaunchError, LintError, MemoryFaultError
from .lint import notes
from .memory import ALIGNMENT
from .runtime import MAX_THREADS, Entry, Options, Statistics, turn
from .signature import TYPES, Argument, Input, Signature, dtype_name, signature
from .source import BODY, HEADER, Part, unit
from .text import casts_pointers, closing, code_only, line_of

# ---- refuse recursion, which Metal does not have and clang accepts ----
#
# Regular expressions find suspects: functions that seem to call themselves, directly or through other functions. A
# suspect is either recursive, or calls an overload or a template of the same name. To decide this, clang compiles the
# translation unit to LLVM IR, in which each function has a unique name.

_DEFINED = re.compile(r"\b([A-Za-z_]\w*)\s*\([^;{}]*\)\s*(?:const\s*)?\{")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^;(){}]*>\s*)?\(")
_NO_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof", "alignas"}
_FUNCTION = re.compile(r"^define [^@]*@\"?([\w.$]+)\"?\(", re.MULTILINE)
_CALL = re.compile(r"\bcall [^@\n]*@\"?([\w.$]+)\"?\(")


def suspects(header: str) -> set[str]:
    """Return the names of a header's functions that seem to call themselves, directly or through other functions."""
    code = code_only(header, directives=False)
    calls: dict[str, set[str]] = {}
    for match in _DEFINED.finditer(code):
        if match[1] not in _NO_FUNCTIONS:
            start = match.end() - 1
            calls.setdefault(match[1], set()).update(_CALLED.findall(code[start : closing(code, start)]))
    return set(_in_cycles(calls))


def defined_at(header: str, name: str) -> int:
    """Return the line of the header in which a function is defined; 1 if it is not found."""
    code = code_only(header, directives=False)
    return next((line_of(code, match.start()) for match in _DEFINED.finditer(code) if match[1] == name), 1)


def recursive(ir: str, names: Iterable[str]) -> str | None:
    """Return one of `names` whose function calls itself in the LLVM IR of a translation unit; None if none does."""
    pieces = _FUNCTION.split(ir)
    calls = {name: set(_CALL.findall(body)) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    for mangled in _in_cycles(calls):
        for name in names:
            if f"{len(name)}{name}" in mangled:
                return name
    return None


def _in_cycles(calls: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the functions that call themselves, directly or through other functions."""
    for name in calls:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            called = calls.get(waiting.pop(), set()) - seen
            seen |= called
            waiting += called
        if name in seen:
            yield name


# ---- instantiations: their text, and its compilation ----

Template = Sequence[tuple[str, Any]]
# An array, or a pair of shape and dtype, or an `Input`.
InputSpec = Any


class Instance(NamedTuple):
    """An instantiation of a kernel: the types, template arguments and checks with which it is compiled."""

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    template: tuple[Argument, ...]
    build: str
    suffixes: bool


class Compiled(NamedTuple):
    """A compiled instance."""

    signature: Signature
    entry: Entry


@dataclass(frozen=True)
class KernelText:
    """The kernel as the user wrote it."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    atomic_outputs: bool

    @property
    def casts(self) -> bool:
        """Whether the text casts pointers, so that the kernel may read or write several elements at once."""
        return casts_pointers(self.header) or casts_pointers(self.source)

    def instance(
        self,
        inputs: Sequence[InputSpec],
        output_dtypes: Sequence[Any],
        template: Template | None,
        *,
        build: str = "spaces",
        suffixes: bool = False,
    ) -> Instance:
        """Return the instance for inputs with these shapes and dtypes.

        Raises:
            LaunchError: MLX or Metal does not support a dtype or template argument.
        """
        outputs = tuple(map(dtype_name, output_dtypes))
        for dtype in outputs:
            if dtype not in TYPES:
                raise LaunchError(f"kernel '{self.name}', output dtype {dtype}: expected one of {', '.join(TYPES)}")
        arguments = tuple(Argument.of(name, value) for name, value in template or ())
        return Instance(tuple(map(_input_of, inputs)), outputs, arguments, build, suffixes)

    def signature(self, instance: Instance) -> Signature:
        """Return the signature of an instance."""
        return signature(
            self.name,
            self.source,
            list(zip(self.input_names, instance.inputs, strict=True)),
            list(zip(self.output_names, instance.outputs, strict=True)),
            instance.template,
            atomic_outputs=self.atomic_outputs,
        )

    def generated(self, instance: Instance) -> str:
        """Return the text that MLX compiles, without MLX's preamble."""
        return self.signature(instance).text(self.header, self.source)


def _input_of(spec: InputSpec) -> Input:
    """Return the `Input` that describes an array, or a pair of shape and dtype."""
    if isinstance(spec, Input):
        return spec
    shape, dtype = spec if isinstance(spec, tuple) else (spec.shape, spec.dtype)
    return Input.of(dtype_name(dtype), shape)


def compile_together(wanted: Sequence[tuple[KernelText, Instance]], *, optimize: bool = True) -> list[Compiled]:
    """Compile instances as one translation unit; all must have the same `build` and `suffixes`.

    Raises:
        CompileError: an instance does not compile; the message is about the first such instance.
    """
    name, suffixes = wanted[0][1].build, wanted[0][1].suffixes
    build = (BUILDS if optimize else QUICK).get(name, UNOPTIMIZED)
    for text in dict.fromkeys(text for text, _ in wanted):
        lint.check(text.name, text.header, text.source, suffixes=suffixes)
    signatures = [text.signature(instance) for text, instance in wanted]
    parts = [Part(one, text.header, text.source) for one, (text, _) in zip(signatures, wanted, strict=True)]
    try:
        file = kernel_library(
            unit(parts), build, None if name == RACES.name else partial(_refuse_recursion, wanted, parts)
        )
    except CompileError as error:
        if len(wanted) > 1:  # compile the instances one by one, to find the first that does not compile
            return [compiled for one in wanted for compiled in compile_together([one], optimize=optimize)]
        if isinstance(error, LintError):
            raise
        ((text, instance),) = wanted
        hint = lint.hints(str(error), list(zip(text.input_names, instance.inputs, strict=True)))
        raise CompileError(f"kernel '{text.name}' does not compile\n{error}{hint}") from None
    return [Compiled(one, Entry(file, i)) for i, one in enumerate(signatures)]


def _refuse_recursion(wanted: Sequence[tuple[KernelText, Instance]], parts: Sequence[Part]) -> None:
    """Raise LintError if a function of a header calls itself. Only the first instance of each kernel is examined."""
    first = {text: part for (text, _), part in zip(reversed(wanted), reversed(parts), strict=True)}
    for text, part in first.items():
        names = suspects(text.header)
        found = recursive(calls_of(unit([part]), SPACES), names) if names else None
        if found:
            raise LintError(
                f"kernel '{text.name}' is not valid in Metal\n  header, line {defined_at(text.header, found)}: "
                f"`{found}` calls itself; Metal has no recursion, write a loop"
            )


# Values of `lanes`: which lanes must take part in a SIMD-group operation.
LANES = ("active", "all")
# Values of `layout`, the layout of cooperative tensors: any layout, chosen by the seed, or the layout of an M5.
LAYOUTS = ("any", "m5")
# The bytes that may fill threadgroup memory before a run. In every float type, 0xFF gives NaN, and the other two bytes
# give numbers of large magnitude. The seed and the build choose one of the bytes, so that a result that depends on
# unwritten memory differs between runs.
POISONS = (0xFF, 0x7B, 0xFB)
TIME_LIMIT = 10.0  # the default limit of a threadgroup in seconds of CPU time
_MATH_MODES = ("safe", "relaxed", "fast")


class MetalKernel:
    """A kernel that is called like the result of `mx.fast.metal_kernel`; see `metal_kernel`.

    Attributes:
        statistics: statistics of the last call; None before the first.
    """

    def __init__(self, text: KernelText, *, ensure_row_contiguous: bool) -> None:
        self.statistics: Statistics | None = None
        self._text = text
        self._row_contiguous = ensure_row_contiguous
        self._compiled: dict[Instance, Compiled] = {}
        self._alignments: dict[Instance, Alignments] = {}  # in the keys, `build` is empty: all builds share alignments

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._text.name

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        return self._text.output_names

    @property
    def atomic_outputs(self) -> bool:
        """Whether the outputs are atomic, so that their last bits may depend on the order of threads."""
        return self._text.atomic_outputs

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Possible mistakes in the kernel's text."""
        return notes(self._text.source)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        seed: int = 0,
        build: str = "spaces",
        lanes: str = "active",
        suffixes: bool = False,
        guard: str | None = None,
        time_limit: float = TIME_LIMIT,
        print_from: Sequence[int] = (0, 0, 0),
        trace: tuple[str, int] | None = None,
        layout: str = "any",
    ) -> list[mx.array]:
        """Run the kernel over the grid and return its outputs.

        Args:
            inputs: arrays of MLX or NumPy, or numbers.
            output_shapes: one shape per output.
            output_dtypes: one dtype per output.
            grid: total threads (not threadgroups) per axis.
            threadgroup: threads per axis of a threadgroup; at most 1,024 in all.
            template: name and value (int, bool, dtype) of each template parameter.
            init_value: initial value of outputs; by default they are filled with bytes 0xFF, which are NaN in floats.
            verbose: print the generated text.
            stream: ignored; accepted because MLX accepts it.
            seed: the order of threads: 0 ascending, 1 descending, others shuffled. Results must not depend on it.
            build: which checks are made. All builds check bounds, convergence, alignment and address spaces. "spaces"
                makes no further checks. "undefined" also checks for undefined behaviour such as overflow. "races" also
                checks for data races, checks bounds to the byte, and is several times slower.
            lanes: "active": SIMD-group operations are over the lanes that reach them, as in Metal. Reading a lane that
                does not reach the operation is an error. Only a shift such as `simd_shuffle_down` may read it, because
                tree reductions do this and do not use the value: the shift returns NaN and sets
                `statistics.undefined`. "all": all 32 lanes must reach the operation, as CUDA requires.
            suffixes: refuse floating-point literals without a suffix, which are doubles in CUDA and floats in Metal.
            guard: whether unmapped memory is adjacent to the "end" or the "start" of buffers; by default "end" for even
                seeds and "start" for odd seeds.
            print_from: position in the grid of the thread whose `os_log_default.log("x = %f", x)` is printed.
            time_limit: seconds of CPU time after which a threadgroup is reported as not ending.
            trace: an output's name and the flat index of an element. After the call, `statistics.writer` has the last
                thread that wrote the element, and the line of this write. Only in the build "races".
            layout: which thread has which element of a cooperative tensor. "any": the seed decides, because Metal does
                not define the layout; setting elements without querying their index is an error. "m5": as on an M5.

        Raises:
            EmulatorError: the kernel or its call is wrong; see `errors`.
        """
        text = self._text
        _check_arrays(text, inputs, output_shapes, output_dtypes)
        check_grid(f"kernel '{text.name}'", grid, threadgroup)
        check_switches(f"kernel '{text.name}'", seed, build, lanes, guard, layout)
        if not 0 < time_limit < 1e6 or len(print_from) != 3:
            raise LaunchError(
                f"kernel '{text.name}': expected time_limit in seconds, above 0, and print_from of three numbers, "
                f"found {time_limit!r} and {print_from!r}"
            )
        memories = [self._memory(value) for value in inputs]
        kinds = [Input.of(memory.dtype, memory.shape) for memory in memories]
        instance = text.instance(kinds, output_dtypes, template, build=build, suffixes=suffixes)
        if verbose:
            print(text.generated(instance))  # noqa: T201 - as MLX does
        _compile([(self, instance)])
        run = Run(
            kernel=text.name,
            texts={HEADER: text.header, BODY: text.source},
            grid=grid,
            threadgroup=threadgroup,
            init_value=init_value,
            options=options_of(seed, build, lanes, guard, time_limit, layout, print_from),
            alignment=ALIGNMENT if build == "races" or text.casts else 1,
            trace=_traced(text, trace, output_dtypes, build) if trace else None,
        )
        try:
            arrays, self.statistics = self._dispatch(run, instance, memories, output_shapes)
        except MemoryFaultError as fault:

            def repeat(build: str) -> None:
                again = instance._replace(build=build)
                _compile([(self, again)])
                run.options.races = build == "races"
                self._dispatch(replace(run, trace=None), again, memories, output_shapes)

            raise located(fault, repeat) from None
        return arrays

    def _dispatch(
        self, run: Run, instance: Instance, memories: Sequence[Memory], output_shapes: Sequence[Sequence[int]]
    ) -> tuple[list[mx.array], Statistics]:
        alignments = self._alignments.setdefault(instance._replace(build=""), {})
        of = self._compiled[instance]
        return until_aligned(partial(dispatch, run, of.signature, of.entry, memories, output_shapes, alignments))

    def _memory(self, value: Any) -> Memory:
        try:
            return memory_of(value, row_contiguous=self._row_contiguous)
        except ValueError as error:
            if "function transformations" not in str(error):
                raise
            raise LaunchError(
                f"kernel '{self.name}': called by mx.compile, mx.vmap or mx.export_function, with arrays that have no "
                "values yet: the emulator needs values\n"
                "  for mx.compile: call mx.disable_compile() first\n"
                "  for mx.vmap: call the function once per element; MLX has no vmap of a metal_kernel\n"
                "  for mx.export_function: export on a GPU, without the emulator; emulated kernels cannot be exported"
            ) from None

    def prepare(
        self,
        instances: Sequence[tuple[Sequence[InputSpec], Sequence[Any], Template | None]],
        *,
        build: str = "spaces",
        suffixes: bool = False,
        optimize: bool = True,
    ) -> None:
        """Compile many instantiations as one translation unit, several times faster than one unit per instantiation.

        An instantiation is (inputs, output dtypes, template); an input is an array, or a pair of shape and dtype.
        Without `optimize`, compilation takes a tenth of the time, and later calls run several times slower.
        """
        prepare([(self, *instance) for instance in instances], build=build, suffixes=suffixes, optimize=optimize)

    def text(self, inputs: Sequence[InputSpec], output_dtypes: Sequence[Any], template: Template | None = None) -> str:
        """Return exactly the text that MLX would compile for these inputs and dtypes, without MLX's preamble."""
        return self._text.generated(self._text.instance(inputs, output_dtypes, template))


def prepare(
    requests: Sequence[tuple[MetalKernel, Sequence[InputSpec], Sequence[Any], Template | None]],
    *,
    build: str = "spaces",
    suffixes: bool = False,
    optimize: bool = True,
) -> None:
    """Compile instantiations of several kernels as one translation unit; see `MetalKernel.prepare`.

    Raises:
        CompileError: a kernel does not compile; the message is about the first such kernel.
    """
    wanted = []
    for kernel, inputs, output_dtypes, template in requests:
        check_switches(f"kernel '{kernel.name}'", 0, build, "active", None)
        instance = kernel._text.instance(inputs, output_dtypes, template, build=build, suffixes=suffixes)
        wanted.append((kernel, instance))
    _compile(wanted, optimize=optimize)


def _compile(wanted: Sequence[tuple[MetalKernel, Instance]], *, optimize: bool = True) -> None:
    """Compile the instances that are not compiled yet."""
    missing = list(dict.fromkeys((kernel, one) for kernel, one in wanted if one not in kernel._compiled))
    if missing:
        compiled = compile_together([(kernel._text, instance) for kernel, instance in missing], optimize=optimize)
        with turn:
            for (kernel, instance), one in zip(missing, compiled, strict=True):
                kernel._compiled[instance] = one


# ---- checks of calls ----


def _check_arrays(
    text: KernelText,
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[Any],
) -> None:
    for what, found, names in (
        ("inputs", inputs, text.input_names),
        ("output_shapes", output_shapes, text.output_names),
        ("output_dtypes", output_dtypes, text.output_names),
    ):
        if len(found) != len(names):
            expected = f"{len(names)} ({', '.join(names)})"
            raise LaunchError(f"kernel '{text.name}', {what}: expected {expected}, found {len(found)}")


def _traced(text: KernelText, trace: tuple[str, int], dtypes: Sequence[Any], build: str) -> tuple[int, int]:
    """Return the output's index and the element's offset in bytes; raise LaunchError if `trace` is invalid."""
    name, index = trace
    if name not in text.output_names or index < 0 or build != "races":
        outputs = ", ".join(text.output_names)
        raise LaunchError(
            f"kernel '{text.name}', trace {trace!r}: expected one of {outputs} and an index from 0 on, in the build "
            f"'races', found build {build!r}"
        )
    place = text.output_names.index(name)
    return place, index * dtypes[place].size


def check_grid(where: str, grid: Sequence[int], threadgroup: Sequence[int]) -> None:
    """Raise LaunchError if Metal refuses the grid or the threadgroup; the message begins with `where`."""
    for what, three in (("grid", grid), ("threadgroup", threadgroup)):
        if len(three) != 3 or min(three) < 1:
            raise LaunchError(f"{where}, {what} {tuple(three)}: expected three numbers from 1 on")
    threads = math.prod(map(min, grid, threadgroup))
    if threads > MAX_THREADS:
        raise LaunchError(
            f"{where}, threadgroup {tuple(threadgroup)}: expected at most {MAX_THREADS:,} threads, found {threads:,}"
        )


def check_switches(where: str, seed: int, build: str, lanes: str, guard: str | None, layout: str = LAYOUTS[0]) -> None:
    """Raise LaunchError if an option of a call has an invalid value; the message begins with `where`."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise LaunchError(f"{where}, seed {seed}: expected a number from 0 on, below 2**32")
    if build not in BUILDS:
        raise LaunchError(f"{where}, build {build!r}: expected one of {', '.join(BUILDS)}")
    if lanes not in LANES:
        raise LaunchError(f"{where}, lanes {lanes!r}: expected one of {', '.join(LANES)}")
    if guard not in (None, "start", "end"):
        raise LaunchError(f"{where}, guard {guard!r}: expected 'start' or 'end'")
    if layout not in LAYOUTS:
        raise LaunchError(f"{where}, layout {layout!r}: expected one of {', '.join(LAYOUTS)}")


def options_of(
    seed: int, build: str, lanes: str, guard: str | None, time_limit: float, layout: str,
    print_from: Sequence[int] = (0, 0, 0),
) -> Options:  # fmt: skip
    """Return the runtime's options for a call whose arguments have passed `check_switches`."""
    races = build == "races"
    return Options(
        seed=seed,
        all_lanes=lanes == "all",
        races=races,
        at_end=guard == "end" if guard else seed % 2 == 0,
        poison=POISONS[(seed + 2 * races) % len(POISONS)],
        patience=int(time_limit * 1000),
        m5=layout == "m5",
        print_from=tuple(print_from),
    )


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
) -> MetalKernel:
    """Return a kernel for the emulator, from the arguments of `mx.fast.metal_kernel`.

    Args:
        name: an identifier.
        input_names: one per input. For an input `x`, the body can also use `x_shape`, `x_strides` and `x_ndim`.
        output_names: one per output.
        source: the body of the kernel.
        header: text before the kernel: functions, types, constants.
        ensure_row_contiguous: whether to copy inputs that are not row-contiguous.
        atomic_outputs: whether outputs are `device atomic<T>*`.
        compile_options: {"math_mode": ...}, which has no effect: arithmetic is always in the mode "safe".

    Raises:
        LaunchError: MLX or Metal does not accept a name or an option.
    """
    if not (name.isascii() and name.isidentifier()):
        raise LaunchError(f"kernel name {name!r}: expected an identifier, because it is part of a function's name")
    if not output_names:
        raise LaunchError(f"kernel '{name}': expected at least one output, found none")
    options = dict(compile_options or {})
    if options.pop("math_mode", "safe") not in _MATH_MODES or options:
        modes = ", ".join(_MATH_MODES)
        raise LaunchError(f"kernel '{name}', compile_options {compile_options}: expected math_mode, one of {modes}")
    text = KernelText(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
    return MetalKernel(text, ensure_row_contiguous=ensure_row_contiguous)
