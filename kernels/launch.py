"""Launch GPU kernels with one of three executors.

`metal` calls `mx.fast.metal_kernel`, `cuda` runs the kernel's text translated to CUDA, `emulator` runs the kernel on
the CPU. Within `with use(NAME)`, launches use the executor NAME; elsewhere they use the first of the three that this
machine has.

For CUDA, a header (`cuda.cuh`) defines the Metal functions that the kernels use, and address spaces such as `device`
are removed from the text. (They are not defined as empty macros, because CUDA's own headers use the word `device`.)

Except for `prompt_product_tensors`, which needs Metal's tensors, the kernels use only features that Metal and CUDA
share: threadgroups have one dimension, grids consist of whole threadgroups, a scalar argument is an array of one
element, and shapes are read one element at a time, such as `x_shape[0]`. A run on CUDA can reveal data races that the
emulator misses; the speed on CUDA does not predict the speed on Metal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import mlx.core as mx

from .kernel import Kernel

ExecutorName = Literal["metal", "cuda", "emulator"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)

Size: TypeAlias = tuple[int, int, int]
Shape: TypeAlias = tuple[int, ...]
Template: TypeAlias = Sequence[tuple[str, int | bool | mx.Dtype]]


class ExecutorUnavailableError(RuntimeError):
    """This machine does not have the requested executor."""


@dataclass(frozen=True)
class Launch:
    """The arguments of one call of `launch`."""

    kernel: Kernel
    inputs: list[mx.array]
    template: Template
    grid: Size
    threadgroup: Size
    output_shapes: Sequence[Shape]
    output_dtypes: Sequence[mx.Dtype]
    init_value: float | None

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self.kernel.output_names

    @property
    def atomic_outputs(self) -> bool:
        """Whether outputs are atomic, so that their last bits may depend on the order of threads."""
        return self.kernel.atomic_outputs


_chosen: ContextVar[ExecutorName | None] = ContextVar("executor", default=None)
_counts: ContextVar[Counter[str] | None] = ContextVar("counts", default=None)
_planned: ContextVar[list[Launch] | None] = ContextVar("planned", default=None)


def launch(
    kernel: Kernel,
    inputs: list[mx.array],
    *,
    grid: Size,
    threadgroup: Size,
    output_shapes: Sequence[Shape],
    output_dtypes: Sequence[mx.Dtype],
    template: Template = (),
    init_value: float | None = None,
) -> list[mx.array]:
    """Launch a kernel: `grid` threads in total, in groups of `threadgroup` threads. Return the outputs.

    On a GPU, outputs are lazy: errors of the kernel are raised when an output is evaluated. Without `init_value`,
    outputs are uninitialised. `template` has pairs of a template parameter in the kernel's text and its value.

    Raises:
        ValueError: the grid does not consist of whole threadgroups (CUDA would run too many threads in the last
            threadgroup), or a template value is negative.
        ExecutorUnavailableError: the machine has none of the executors.
    """
    if grid[0] % threadgroup[0] or grid[1] % threadgroup[1] or grid[2] % threadgroup[2]:
        raise ValueError(f"{kernel.name}: expected a grid of whole threadgroups, found {grid} threads by {threadgroup}")
    counts = _counts.get()
    if counts is not None:
        counts[kernel.name] += 1
    if negative := [name for name, value in template if isinstance(value, int) and value < 0]:
        raise ValueError(
            f"{kernel.name}: expected template values >= 0, found a negative {', '.join(negative)}; "
            "MLX makes the values part of the kernel's name, where '-' is invalid"
        )
    planned = _planned.get()
    if planned is not None:
        planned.append(Launch(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes, init_value))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    return built(kernel, executor())(
        inputs=inputs,
        template=list(template),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
        init_value=init_value,
    )


def executor() -> ExecutorName:
    """Return the executor of the next launch; raise ExecutorUnavailableError, with the reasons, if there is none."""
    return _chosen.get() or _default()


def require(name: ExecutorName) -> None:
    """Raise ExecutorUnavailableError, with the reason, if this machine does not have an executor."""
    reason = unavailable(name)
    if reason is not None:
        raise ExecutorUnavailableError(f"kernels cannot run on {name!r}: {reason}")


@contextmanager
def use(name: ExecutorName) -> Iterator[None]:
    """Choose the executor of launches within this context; raise ExecutorUnavailableError if it is unavailable."""
    require(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the launches of each kernel within this context. An enclosing `counted` also counts these launches."""
    counts: Counter[str] = Counter()
    outer = _counts.get()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)
        if outer is not None:
            outer.update(counts)


@contextmanager
def planned() -> Iterator[list[Launch]]:
    """Record launches within this context instead of running them; their outputs are zeros."""
    launches: list[Launch] = []
    token = _planned.set(launches)
    try:
        yield launches
    finally:
        _planned.reset(token)


def unavailable(name: ExecutorName) -> str | None:
    """Return why an executor is unavailable, or None if it is available."""
    if name not in EXECUTORS:
        raise ValueError(f"expected one of {', '.join(EXECUTORS)}, found {name!r}")
    if name == "metal":
        # `kernels.emulator.emulate` replaces `is_available` by a function named `pretended`, which always returns True.
        found = mx.metal.is_available.__name__ != "pretended" and mx.metal.is_available()
        return None if found else "MLX finds no Metal GPU; it needs macOS on Apple silicon"
    if name == "cuda":
        return None if mx.cuda.is_available() else "MLX finds no CUDA GPU; it needs Linux and `pip install mlx[cuda13]`"
    from . import emulator

    return emulator.unavailable()


def executors() -> dict[ExecutorName, str | None]:
    """Return the result of `unavailable` for each executor."""
    return {name: unavailable(name) for name in EXECUTORS}


@cache
def _default() -> ExecutorName:
    reasons = executors()
    for name, reason in reasons.items():
        if reason is None:
            return name
    raise ExecutorUnavailableError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


@cache
def built(kernel: Kernel, name: ExecutorName) -> Callable[..., list[mx.array]]:
    """Return the executor's callable for this kernel. The callable is cached, because it holds the compiled code."""
    if name == "cuda":
        return cuda_kernel(kernel)
    arguments: dict[str, Any] = {
        "name": kernel.name,
        "input_names": kernel.input_names,
        "output_names": kernel.output_names,
        "source": kernel.source,
        "header": kernel.header,
        "ensure_row_contiguous": kernel.ensure_row_contiguous,
        "atomic_outputs": kernel.atomic_outputs,
        "compile_options": {"math_mode": kernel.math_mode},
    }
    if name == "metal":
        return cast("Callable[..., list[mx.array]]", mx.fast.metal_kernel(**arguments))
    from . import emulator

    return cast("Callable[..., list[mx.array]]", emulator.metal_kernel(**arguments))


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_THREADGROUP_ARRAY = re.compile(r"\bthreadgroup\s+(?=\w[\w:]*\s+\w+\s*\[)")
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b\s+(?=[\w:])")
_ADDRESS_SPACE_OF_POINTER = re.compile(r"\b(?:device|constant|threadgroup|thread)\b(?=\s*[*&])")


def cuda_kernel(kernel: Kernel) -> Callable[..., list[mx.array]]:
    """Return a kernel for CUDA, called like the result of `mx.fast.metal_kernel`.

    Raises:
        ValueError: the kernel needs a feature that `mx.fast.cuda_kernel` lacks.
        RuntimeError: MLX was built without CUDA.
    """
    if kernel.atomic_outputs or kernel.math_mode != "safe":
        raise ValueError(f"kernel {kernel.name}: CUDA has no atomic outputs, and no math mode but 'safe'")
    arguments: dict[str, Any] = {
        "name": kernel.name,
        "input_names": kernel.input_names,
        "output_names": kernel.output_names,
        "source": translated(kernel.source),
        "header": header() + translated(kernel.header),
        "ensure_row_contiguous": kernel.ensure_row_contiguous,
    }
    return cast("Callable[..., list[mx.array]]", mx.fast.cuda_kernel(**arguments))


def translated(text: str) -> str:
    """Return Metal text as CUDA text: declare threadgroup arrays `__shared__`; remove comments and address spaces."""
    text = _COMMENT.sub("", text)
    text = _THREADGROUP_ARRAY.sub("__shared__ ", text)
    text = _ADDRESS_SPACE.sub("", text)
    return _ADDRESS_SPACE_OF_POINTER.sub("", text)


@cache
def header() -> str:
    """Return the CUDA header that defines the Metal functions."""
    return Path(__file__).with_name("cuda.cuh").read_text(encoding="utf-8")
