"""A launch of a kernel of a whole .metal file, with the interface of `kernels.launch.Launch` that a check needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..emulator import Unwritten, WholeKernel
from ..emulator.signature import TYPES, dtype_name
from ..launch import Shape, Size


@dataclass(frozen=True, eq=False)
class MetalLaunch:
    """The arguments of one launch.

    Attributes:
        kernel: the kernel, from `kernels.emulator.library`.
        buffers: by index, as in a call of the kernel.
        grid: threads in each direction.
        threadgroup: threads of a threadgroup in each direction.
        threadgroup_memory: bytes by index.
        outputs: the indices of the buffers that are compared.
    """

    kernel: WholeKernel
    buffers: Mapping[int, Any]
    grid: Size
    threadgroup: Size
    threadgroup_memory: Mapping[int, int]
    outputs: Sequence[int]

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The parameters' names."""
        names = {one.slot: one.name for one in self.kernel.parameters if one.role == "buffer"}
        return tuple(names[i] for i in self.outputs)

    @property
    def atomic_outputs(self) -> bool:
        """Whether the last bits of the outputs may depend on the order of threads: never said by a .metal file."""
        return False

    @property
    def output_shapes(self) -> list[Shape]:
        """One per output."""
        return [tuple(self.buffers[i].shape) for i in self.outputs]

    @property
    def output_dtypes(self) -> list[mx.Dtype | None]:
        """One per output; None for structures."""
        return [_dtype_of(self.buffers[i]) for i in self.outputs]

    def run(
        self, *, trace: tuple[str, int] | None = None, suffixes: bool = False, **options: Any
    ) -> list[mx.array | np.ndarray[Any, Any]]:
        """Return the outputs; the options are those of a call of the kernel.

        Args:
            trace: an output's name and the index of an element, whose last writer is noted.
            suffixes: ignored; a .metal file is no text for CUDA.
            options: `seed`, `build`, `lanes`, ...
        """
        traced = None
        if trace is not None:
            place = self.outputs[self.output_names.index(trace[0])]
            value = self.buffers[place]
            traced = (
                place,
                trace[1] * (value.nbytes // max(1, value.size) if hasattr(value, "nbytes") else _item(value)),
            )
        found = self.kernel(
            self.buffers, grid=self.grid, threadgroup=self.threadgroup, threadgroup_memory=self.threadgroup_memory,
            trace=traced, **options,
        )  # fmt: skip
        return [found[i] for i in self.outputs]


def _item(value: Unwritten) -> int:
    if isinstance(value.dtype, mx.Dtype):
        return value.dtype.size
    return int(np.dtype(value.dtype).itemsize)


def _dtype_of(value: Any) -> mx.Dtype | None:
    name = dtype_name(value.dtype)
    return getattr(mx, "bool_" if name == "bool" else name) if name in TYPES else None
