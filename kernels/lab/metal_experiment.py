"""`MetalExperiment`: a kernel of a complete .metal file, with its buffers, grid and NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cached import cached_property
from ..emulator import Unwritten, WholeKernel, library
from ..emulator.signature import TYPES, dtype_name
from ..launch import Shape, Size
from .arrays import Sizes, in_numpy
from .experiment import check_names, check_parameters, check_switches, check_threadgroup, three


@dataclass(frozen=True, eq=False)
class MetalLaunch:
    """The arguments of one launch of a kernel in a .metal file; see `MetalExperiment`.

    The class has those attributes of `kernels.launch.Launch` that `check.py` reads.

    Attributes:
        outputs: the indices of the buffers that are compared with the reference.
    """

    kernel: WholeKernel
    buffers: Mapping[int, Any]
    grid: Size
    threadgroup: Size
    threadgroup_memory: Mapping[int, int]
    outputs: Sequence[int]
    layout: str = "any"

    atomic_outputs = False  # a .metal file cannot declare that the last bits depend on the order of threads

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The names of the output parameters."""
        names = {one.slot: one.name for one in self.kernel.parameters if one.role == "buffer"}
        return tuple(names[i] for i in self.outputs)

    @property
    def output_shapes(self) -> list[Shape]:
        """The shapes of the outputs."""
        return [tuple(self.buffers[i].shape) for i in self.outputs]

    @property
    def output_dtypes(self) -> list[mx.Dtype | None]:
        """The types of the outputs; None for an output of structures."""
        return [_dtype_of(self.buffers[i]) for i in self.outputs]

    def run(
        self, *, trace: tuple[str, int] | None = None, suffixes: bool = False, **options: Any
    ) -> list[mx.array | np.ndarray[Any, Any]]:
        """Run the launch and return the outputs.

        Args:
            trace: an output's name and the flat index of an element. After a run in the emulator's build "races", the
                kernel's `statistics.writer` is a note about the thread that last wrote the element.
            suffixes: whether floating-point literals must have a suffix, as CUDA requires. Ignored, because a .metal
                file is not translated to CUDA.
            options: options of a call of the kernel: `seed`, `build`, `lanes`, ...
        """
        traced = None
        if trace is not None:
            place = self.outputs[self.output_names.index(trace[0])]
            dtype = self.buffers[place].dtype
            size = dtype.size if isinstance(dtype, mx.Dtype) else np.dtype(dtype).itemsize
            traced = place, trace[1] * size
        found = self.kernel(
            self.buffers, grid=self.grid, threadgroup=self.threadgroup, threadgroup_memory=self.threadgroup_memory,
            trace=traced, layout=self.layout, **options,
        )  # fmt: skip
        return [found[i] for i in self.outputs]


def _dtype_of(value: Any) -> mx.Dtype | None:
    name = dtype_name(value.dtype)
    return getattr(mx, "bool_" if name == "bool" else name) if name in TYPES else None


Buffers = Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class MetalExperiment:
    """A kernel of a .metal file with everything needed to run and check it in the emulator.

    The arguments of the functions below are chosen by the names of their parameters. A parameter with the name of a
    size gets this size. The function `buffers` may also have a parameter `rng`, a random generator. The function
    `reference` may also have a parameter `buffers`, a dict of the buffers by index, with floats as float64.

    Attributes:
        file: the .metal file.
        function: the kernel's `host_name`; for a kernel without this attribute, the name of the function.
        buffers: function that returns a list of the buffers, or a dict by index. A buffer is an array, a structure, a
            number or, for an output, `Unwritten(shape, dtype)`.
        reference: NumPy function that returns a dict that maps the index of each output buffer to its expected value.
        grid: total threads (not threadgroups) in each direction, or a function that returns them.
        threadgroup: threads of a threadgroup in each direction, or a function that returns them.
        sizes: a list of dicts of sizes by name; a check makes one launch per dict.
        threadgroup_memory: bytes of each threadgroup memory argument, by index, or a function that returns them.
        constants: function constants by index or name.
        include: folders for `#include`.
        bound: the largest accepted error, as a multiple of float32's epsilon times the largest absolute number of the
            expected output. If the output's type is shorter than float32, its rounding error is accepted in addition.
        lanes: "all" if all lanes must take part in SIMD-group operations; "active" if only active lanes
            must, as in Metal.
        layout: which thread holds which elements of cooperative tensors: with "any", the seed decides; "m5" is the
            layout of an M5, for kernels that run only on an M5.

    Raises:
        ValueError: the definition has a mistake.
        LaunchError, CompileError: the file has no such kernel, or cannot be preprocessed.
    """

    file: str | Path
    function: str
    buffers: Callable[..., Buffers | Sequence[Any]]
    reference: Callable[..., Mapping[int, Any]]
    grid: Any
    threadgroup: Any
    sizes: Sequence[Sizes] = field(default_factory=lambda: [{}])
    threadgroup_memory: Any = None
    constants: Mapping[int | str, float] | None = None
    include: Sequence[str | Path] = ()
    bound: float = 4.0
    lanes: str = "active"
    layout: str = "any"

    suffixes = False  # literals need suffixes only in CUDA, and .metal files are not translated to CUDA

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise ValueError(f"{self.function}: expected a .metal file, found no file {self.file}")
        names = sorted({name for sizes in self.sizes for name in sizes})
        check_names(self.function, names)
        check_switches(self.function, self.lanes, False)
        if not self.sizes or any(set(sizes) != set(names) for sizes in self.sizes):
            raise ValueError(f"{self.function}.sizes: expected at least one dict, and the same names in all")
        check_parameters(self.buffers, [*names, "rng"], f"{self.function}.buffers")
        check_parameters(self.reference, [*names, "buffers"], f"{self.function}.reference")
        for name in ("grid", "threadgroup", "threadgroup_memory"):
            if callable(getattr(self, name)):
                check_parameters(getattr(self, name), names, f"{self.function}.{name}")
        self.kernel  # noqa: B018 - raises errors now

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.function

    @cached_property
    def kernel(self) -> WholeKernel:
        """The kernel of the file."""
        return library(Path(self.file), self.include).function(self.function, self.constants)

    def launch(self, sizes: Sizes, seed: int = 0) -> tuple[MetalLaunch, Callable[[], list[NDArray[Any]]]]:
        """Return the launch for `sizes`, and a function that returns the launch's expected outputs.

        Raise ValueError if the grid or threadgroup is invalid, or the reference returns a wrong shape or a buffer that
        the kernel does not write.
        """
        given = call(self.buffers, {**sizes, "rng": np.random.default_rng(seed)})
        buffers = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        expected = self._expected(sizes, buffers)
        grid: Size = three(call(self.grid, sizes), f"{self.function}.grid")
        threadgroup = check_threadgroup(self.function, call(self.threadgroup, sizes))
        memory = call(self.threadgroup_memory, sizes) or {}
        launch = MetalLaunch(self.kernel, buffers, grid, threadgroup, memory, tuple(expected), self.layout)
        return launch, partial(list, expected.values())

    def _expected(self, sizes: Sizes, buffers: Buffers) -> dict[int, NDArray[Any]]:
        numbers = {i: in_numpy(x) if isinstance(x, mx.array) else _wide(x) for i, x in buffers.items()}
        found = call(self.reference, {**sizes, "buffers": numbers})
        written = {one.slot for one in self.kernel.parameters if one.role == "buffer" and one.is_written}
        if not isinstance(found, Mapping) or not found or not set(found) <= written:
            shown = [*found] if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(
                f"{self.function}.reference: expected arrays by the index of a buffer that the kernel writes "
                f"({', '.join(map(str, sorted(written)))}), found {shown}"
            )
        for i, value in found.items():
            shape = tuple(getattr(buffers.get(i), "shape", ()))
            if np.asarray(value).shape != shape:
                raise ValueError(
                    f"{self.function}.reference: expected buffer {i} {shape}, found {np.asarray(value).shape}"
                )
        return {i: np.asarray(value) for i, value in found.items()}


def call(value: Any, known: Mapping[str, Any]) -> Any:
    """Return `value`; if it is a function, return its result for the values in `known` that its parameters name."""
    if not callable(value):
        return value
    return value(**{name: known[name] for name in check_parameters(value, list(known), "")})


def _wide(value: Any) -> Any:
    """Return a NumPy array of floats as float64, and any other value unchanged."""
    if isinstance(value, Unwritten) or not isinstance(value, np.ndarray | np.generic) or value.dtype.kind != "f":
        return value
    return value.astype(np.float64)
