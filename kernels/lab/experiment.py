"""`Experiment`: a kernel with its arrays, grid and NumPy reference, for `check` and `bench`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import lcm, prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cached import cached_property
from ..emulator.compiler import BUILDS
from ..emulator.kernel import LANES
from ..emulator.runtime import MAX_THREADS
from ..emulator.text import compares_numbers
from ..kernel import Kernel
from ..launch import Launch, Size
from .arrays import CHOSEN, STORED, Array, Sizes, dtype_of, on_device, parse, random_values

# Sizes of an axis that reveal mistakes: around 1, around a SIMD-group (32), around a threadgroup (256), and odd sizes.
RAGGED = (1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 100, 127, 256, 257)
# The largest number of shapes that `ragged` chooses; it may add a large shape (see `BEYOND`).
SHAPES = 24
# The largest product of the sizes of a chosen shape, so that NumPy and the emulator are fast.
MOST_NUMBERS = 1 << 18
# If possible, one shape has an array of more elements than this, to reveal indices of 16 bits.
BEYOND = 1 << 16


@dataclass(frozen=True, eq=False)
class Experiment:
    """A kernel with everything needed to run and check it.

    An array is described by a type and axes: "float16 V K" is a float16 matrix, "N" a float32 vector, "" one number.
    The type T stands for float32 and float16; both are tested. In the kernel's text, the name of an axis or constant
    stands for its number.

    "q8_0 N K" describes a Q8_0 matrix. For such an array `w`, the kernel gets two arrays: `wq`, uint32 (N, K/4), the
    quants, and `ws`, float16 (N, K/32), the scales (see kernels/metal/layout.py). The reference gets `w` as float64.
    q4_0, q4_k, q6_k and MLX's types (affine4_g64_f16) are also passed as `wq` and `ws`. For q4_1, q5_0, q5_1, q2_k,
    q3_k, q5_k, iq4_nl, iq4_xs and mxfp4, the kernel gets one array `w`: the blocks of a file, uint8 (N, bytes of a
    row).

    Each parameter of the functions `reference`, `threads`, `magnitude` and `data` has the name of an axis or constant,
    and gets its value. Parameters of `reference` and `magnitude` can also name inputs. A parameter `rng` of `data` gets
    a random generator.

    Attributes:
        name: the kernel's name, an identifier.
        source: the body of the kernel in the Metal Shading Language; MLX generates the signature.
        inputs, outputs: map the names of arrays to their descriptions.
        reference: NumPy function that returns the expected output for float64 inputs; a tuple for several outputs.
        threads: function that returns the threads in each direction; these are rounded up to whole threadgroups.
        threadgroup: threads of a threadgroup in each direction.
        constants: maps names in the kernel's text to the ints and bools for which they stand.
        header: text before the kernel, such as functions that the kernel calls.
        data: function that returns a dict of the inputs that must not be random.
        magnitude: function that returns the scale of errors for each element of an output; for a matrix product, this
            is the product of `abs(x)` and `abs(w)`. The default is the largest absolute number of the expected output.
        bound: largest accepted error, divided by the magnitude times the float32 epsilon. If the output has a shorter
            type, the rounding to this type is accepted in addition.
        init_value: initial value of outputs.
        atomic_outputs: whether the outputs are atomic; their last bits may then depend on the order of threads.
        lanes: "all" if all lanes must take part in SIMD-group operations, as CUDA requires; "active" if not, as in
            Metal.
        suffixes: whether floating-point literals must have a suffix, as CUDA requires.
        sizes: default of the argument `sizes` of `check`; if both are None, `ragged` chooses shapes.
        least: smallest sizes of axes, if larger than 1, such as {"N": 4}.
        ties: whether a kernel that compares numbers is also checked with inputs that have many equal numbers. Among
            equal numbers, the kernel must then choose the one that the reference chooses. Set `ties` to False if the
            kernel may choose any of the equal numbers.

    Raises:
        ValueError: the definition has a mistake.
    """

    name: str
    source: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    reference: Callable[..., Any]
    threads: Callable[..., int | tuple[int, ...]]
    threadgroup: int | tuple[int, ...] = 256
    constants: Mapping[str, int | bool] = field(default_factory=dict)
    header: str = ""
    data: Callable[..., Mapping[str, Any]] | None = None
    magnitude: Callable[..., Any] | None = None
    bound: float = 4.0
    init_value: float | None = None
    atomic_outputs: bool = False
    lanes: str = "active"
    suffixes: bool = False
    sizes: Mapping[str, Sequence[int]] | Sequence[Sizes] | None = None
    least: Mapping[str, int] = field(default_factory=dict)
    ties: bool = True

    def __post_init__(self) -> None:
        self.kernel  # noqa: B018 - raises errors now
        given, made = self.arrays
        check_least(self.name, self.least, self.axes)
        if self.sizes is not None:
            check_sizes(self.name, self.sizes)
        if not made:
            raise ValueError(f"{self.name}: expected at least one output, found none")
        arrays = [*dict.fromkeys((*self.inputs, *(part for array in given for part in array.parts))), *self.outputs]
        check_names(self.name, [*arrays, *self.axes, *self.constants])
        check_constants(self.name, self.constants)
        check_threadgroup(self.name, self.threadgroup)
        check_switches(self.name, self.lanes, self.suffixes)
        self._check_functions()

    def _check_functions(self) -> None:
        """Check the parameters of all functions, and the results of `threads` and `data` for the smallest sizes.

        Exceptions of `threads` and `data` are ignored, because the functions need not support the smallest sizes if
        checks use only larger sizes.
        """
        numbers = {**self.smallest, **self.constants}
        everything = [*numbers, *self.inputs]
        for name, known in (("threads", [*numbers]), ("reference", everything), ("magnitude", everything)):
            if name != "magnitude" or self.magnitude is not None:
                check_parameters(getattr(self, name), known, f"{self.name}.{name}")
        found: list[Any] = []
        with suppress(Exception):
            found.append(call(self.threads, numbers, ""))
        for threads in found:
            three(threads, f"{self.name}.threads", least=0)
        if self.data is not None:
            check_parameters(self.data, [*numbers, "rng"], f"{self.name}.data")
            data: list[Any] = []
            with suppress(Exception):
                data.append(call(self.data, {**numbers, "rng": np.random.default_rng(0)}, ""))
            for values in data:
                check_data(values, list(self.inputs), f"{self.name}.data")

    @cached_property
    def arrays(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The parsed inputs and outputs; ValueError if a description is invalid, or an output's type is quantised."""
        given, made = (
            tuple(parse(name, text, self.name) for name, text in described.items())
            for described in (self.inputs, self.outputs)
        )
        if stored := [array.type for array in made if array.type in STORED]:
            raise ValueError(f"{self.name}: expected outputs of numbers, found a {stored[0]} matrix")
        return given, made

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel's text and the names of its arrays."""
        given, made = self.arrays
        return Kernel(
            self.name,
            tuple(part for array in given for part in array.parts),
            tuple(array.name for array in made),
            self.source,
            self.header,
            atomic_outputs=self.atomic_outputs,
        )

    @cached_property
    def axes(self) -> dict[str, int]:
        """Maps each named axis, in order of appearance, to the number that must divide its size."""
        found: dict[str, int] = {}
        for array in (*self.arrays[0], *self.arrays[1]):
            for name, multiple in array.multiples.items():
                found[name] = lcm(found.get(name, 1), multiple)
        return found

    @property
    def smallest(self) -> dict[str, int]:
        """The smallest size of each axis."""
        return {name: -(-self.least.get(name, 1) // multiple) * multiple for name, multiple in self.axes.items()}

    @cached_property
    def compares(self) -> bool:
        """Whether to also test many equal numbers: if `ties` is set and the text seems to compare floats."""
        return self.ties and compares_numbers(self.header + self.source, [array.name for array in self.arrays[0]])

    @property
    def has_choice(self) -> bool:
        """Whether an array is of type T."""
        return any(array.type == CHOSEN for arrays in self.arrays for array in arrays)

    def label(self, sizes: Sizes, dtype: str) -> str:
        """Return the sizes as text, followed by the type that T stands for, if T occurs."""
        text = " ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{text} T={dtype}" if self.has_choice else text

    def ragged(self, n: int = SHAPES) -> list[dict[str, int]]:
        """Return at most n + 1 shapes that are likely to reveal mistakes, the same in each call, the smallest first."""
        choices = [
            [least, *(multiple * size for size in RAGGED if multiple * size > least)]
            for (_, multiple), least in zip(self.axes.items(), self.smallest.values(), strict=True)
        ]
        every = [sizes for sizes in product(*choices) if prod(sizes) <= MOST_NUMBERS]
        chosen = [every[0], *random.Random(0).sample(every[1:], min(n, len(every)) - 1)]
        ordered = [dict(zip(self.axes, sizes, strict=True)) for sizes in sorted(chosen, key=lambda s: (prod(s), s))]
        return ordered + self._beyond(ordered)

    def _beyond(self, chosen: Sequence[Sizes]) -> list[dict[str, int]]:
        """Return one more shape if none of `chosen` has an array of more than `BEYOND` elements.

        In this shape, the last named axis of the outputs is large, and all other axes have their smallest sizes. If an
        array would have more than 4 * BEYOND elements, return no shape.
        """
        arrays = (*self.arrays[0], *self.arrays[1])
        named = [axis.name for array in self.arrays[1] for axis in array.axes if axis.name is not None]
        if not named or any(prod(array.shape(sizes)) > BEYOND for sizes in chosen for array in arrays):
            return []
        least, grown = self.smallest, named[-1]
        most = max(prod(array.shape(least)) for array in arrays if grown in array.multiples)
        least[grown] *= BEYOND // most + 1
        return [least] if max(prod(array.shape(least)) for array in arrays) <= 4 * BEYOND else []

    def launch(
        self, sizes: Sizes, dtype: str = "float32", seed: int = 0, *, tied: bool = False
    ) -> tuple[Launch, dict[str, NDArray[Any]]]:
        """Return a launch, and a dict of its inputs in float64, int64 or bool, for the reference.

        Inputs that `data` does not return are random. With `tied`, random floats have only a few distinct values. Raise
        ValueError if a size is missing, too small or not divisible as required, or a function's result is invalid.
        """
        self._check(sizes)
        known = {**sizes, **self.constants}
        rng = np.random.default_rng(seed)
        special: Mapping[str, Any] = {}
        if self.data is not None:
            where = f"{self.name}.data"
            special = check_data(call(self.data, {**known, "rng": rng}, where), list(self.inputs), where)
        given: list[Any] = []
        numbers: dict[str, NDArray[Any]] = {}
        for array in self.arrays[0]:
            shape = array.shape(sizes)
            values = special[array.name] if array.name in special else random_values(array, shape, rng, tied=tied)
            parts, numbers[array.name] = on_device(array, values, dtype)
            if numbers[array.name].shape != shape:
                raise ValueError(f"{self.name}.data: expected {array.name} {shape}, found {numbers[array.name].shape}")
            given += parts
        template: list[tuple[str, Any]] = list(known.items())
        if self.has_choice:
            template.append((CHOSEN, dtype_of(CHOSEN, dtype)))
        grid, threadgroup = self.geometry(sizes)
        made = self.arrays[1]
        shapes, dtypes = [array.shape(sizes) for array in made], [dtype_of(array.type, dtype) for array in made]
        return Launch(self.kernel, given, template, grid, threadgroup, shapes, dtypes, self.init_value), numbers

    def geometry(self, sizes: Sizes) -> tuple[Size, Size]:
        """Return the grid (total threads, in whole threadgroups) and the threadgroup."""
        where = f"{self.name}.threads"
        wanted = three(call(self.threads, {**sizes, **self.constants}, where), where)
        group = check_threadgroup(self.name, self.threadgroup)
        x, y, z = (-(-threads // size) * size for threads, size in zip(wanted, group, strict=True))
        return (x, y, z), group

    def expected(self, sizes: Sizes, numbers: Mapping[str, Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield for each output the expected value, and the magnitude (the scale of errors) in the same shape.

        Raise ValueError if a function fails or its result has the wrong shape.
        """
        known = {**sizes, **self.constants, **numbers}
        of = f" for {' '.join(f'{name}={size}' for name, size in sizes.items())}" if sizes else ""
        results = self._called("reference", known, of)
        magnitudes = (None,) * len(results) if self.magnitude is None else self._called("magnitude", known, of)
        if not len(results) == len(magnitudes) == len(self.outputs):
            raise ValueError(f"{self.name}.reference{of}: expected {len(self.outputs)} arrays, found {len(results)}")
        for array, result, magnitude in zip(self.arrays[1], results, magnitudes, strict=True):
            result, shape = np.asarray(result), array.shape(sizes)
            if result.shape != shape:
                raise ValueError(
                    f"{self.name}.reference{of}: expected {array.name} {shape}, found {result.shape}; if the kernel "
                    "does not support these sizes, exclude them with sizes or least"
                )
            against = np.max(np.abs(result), initial=0, where=np.isfinite(result)) if magnitude is None else magnitude
            yield result, np.broadcast_to(np.asarray(against, dtype=np.float64), shape)

    def _called(self, name: str, known: Mapping[str, Any], of: str) -> tuple[Any, ...]:
        """Call the function in field `name`; return its results as a tuple.

        If the function fails, raise ValueError with `of`, the text that lists the sizes.
        """
        try:
            return _tuple(call(getattr(self, name), known, f"{self.name}.{name}"))
        except Exception as error:
            raise ValueError(f"{self.name}.{name}{of}: {type(error).__name__}: {error}") from error

    def _check(self, sizes: Sizes) -> None:
        least = {name: max(1, self.least.get(name, 1)) for name in self.axes}
        wrong = [
            f"{name}={size}"
            for name, size in sizes.items()
            if size < least.get(name, 1) or size % self.axes.get(name, 1)
        ]
        if set(sizes) != set(self.axes) or wrong:
            wanted = [
                name
                + (f" from {least[name]} on" if least[name] > 1 else "")
                + (f", a multiple of {m}" if m > 1 else "")
                for name, m in self.axes.items()
            ]
            found = wrong or [f"{name}={size}" for name, size in sizes.items()]
            raise ValueError(
                f"{self.name}: expected sizes >= 1 of {'; '.join(wanted)}, found {', '.join(found) or 'none'}"
            )


def call(function: Callable[..., Any], known: Mapping[str, Any], where: str) -> Any:
    """Call `function` with the known values that its parameters name; raise ValueError if a parameter is unknown."""
    wanted = check_parameters(function, list(known), where)
    return function(**{name: known[name] for name in wanted})


def _tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


# ---- checks of an experiment's fields and of a check's arguments, before anything is compiled ----
# Each function raises ValueError with one line: the kernel or its field, what was expected, and what was found.


def check_names(kernel: str, names: Sequence[str]) -> None:
    """Refuse names that two arrays, axes or constants share, and names that Metal does not accept."""
    for name in names:
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise ValueError(f"{kernel}: expected names of letters, digits and _, found {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"{kernel}: expected one meaning per name, found {name} for two arrays, axes or constants")


def check_constants(kernel: str, constants: Mapping[str, Any]) -> None:
    """Refuse constants that cannot be template arguments in Metal."""
    for name, value in constants.items():
        if not isinstance(value, int):
            raise ValueError(
                f"{kernel}: expected int or bool constants, found {name}={value!r}; write a float into the source, "
                "or pass it as an input of one element"
            )


def check_least(kernel: str, least: Any, axes: Mapping[str, int]) -> None:
    """Refuse `least` unless it is a dict from names of axes to whole numbers >= 1."""
    right = isinstance(least, Mapping) and all(
        name in axes and _is_whole(size) and size >= 1 for name, size in least.items()
    )
    if not right:
        raise ValueError(f"{kernel}.least: expected a number from 1 on for any of {', '.join(axes)}, found {least!r}")


def check_threadgroup(kernel: str, threadgroup: Any) -> Size:
    """Return the threads of a threadgroup in each of three directions; refuse more threads than Metal allows."""
    size = three(threadgroup, f"{kernel}.threadgroup")
    if prod(size) > MAX_THREADS:
        raise ValueError(
            f"{kernel}.threadgroup: expected at most {MAX_THREADS:,} threads, found {prod(size):,}: {size}"
        )
    return size


def three(size: Any, where: str, *, least: int = 1) -> Size:
    """Return `size` as three numbers: it is a whole number, or a list of one to three; missing numbers become 1."""
    given = size if isinstance(size, tuple | list) else (size,)
    try:
        whole = [index(n) for n in given]
    except TypeError:
        whole = []
    if not 1 <= len(whole) <= 3 or min(whole) < least:
        hint = "; divide with //" if any(isinstance(n, float) for n in given) else ""
        raise ValueError(f"{where}: expected one to three whole numbers >= {least}, found {size!r}{hint}")
    x, y, z = (*whole, 1, 1)[:3]
    return x, y, z


def check_parameters(function: Callable[..., Any], known: Sequence[str], where: str) -> list[str]:
    """Return the names of a function's parameters without default; refuse names that are not in `known`."""
    if not callable(function):
        raise ValueError(f"{where}: expected a function, found {function!r}")
    wanted = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{where}: expected parameters among {', '.join(known)}, found {', '.join(unknown)}")
    return wanted


def check_data(values: Any, names: Sequence[str], where: str) -> Mapping[str, Any]:
    """Return `values`; refuse anything but a dict whose keys are names of inputs."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a dict of arrays by name, found {type(values).__name__}")
    unknown = [str(name) for name in values if name not in names]
    if unknown:
        raise ValueError(f"{where}: expected inputs among {', '.join(names)}, found {', '.join(unknown)}")
    return values


def check_switches(kernel: str, lanes: Any, suffixes: Any) -> None:
    """Refuse unknown values of `lanes` and `suffixes`, the emulator's switches."""
    if lanes not in LANES:
        raise ValueError(f"{kernel}: expected lanes to be one of {', '.join(LANES)}, found {lanes!r}")
    if not isinstance(suffixes, bool):
        raise ValueError(f"{kernel}: expected suffixes to be True or False, found {suffixes!r}")


def check_orders(kernel: str, seeds: Any, builds: Any) -> None:
    """Refuse seeds that are not from 0 to 2**32 - 1, and builds that do not exist."""
    if isinstance(builds, str) or any(build not in BUILDS for build in builds):
        raise ValueError(f"check {kernel}: expected builds, a list of {', '.join(BUILDS)}, found {builds!r}")
    if isinstance(seeds, int | str) or any(not isinstance(seed, int) or not 0 <= seed < 1 << 32 for seed in seeds):
        raise ValueError(f"check {kernel}: expected seeds, a list of numbers from 0 on, below 2**32, found {seeds!r}")


def check_sizes(kernel: str, sizes: Any) -> None:
    """Refuse sizes that are neither a dict of lists nor a list of dicts."""
    if isinstance(sizes, Mapping):
        every = [[size] if _is_whole(size) else size for size in sizes.values()]
        right = all(isinstance(size, Sequence | range) and all(map(_is_whole, size)) for size in every)
    else:
        right = isinstance(sizes, Sequence) and all(
            isinstance(one, Mapping) and all(map(_is_whole, one.values())) for one in sizes
        )
    if not right:
        raise ValueError(
            f"check {kernel}: expected sizes such as {{'N': [1, 33]}} or [{{'N': 1}}, {{'N': 33}}], found {sizes!r}"
        )


def _is_whole(size: Any) -> bool:
    return hasattr(size, "__index__") and not isinstance(size, bool)
