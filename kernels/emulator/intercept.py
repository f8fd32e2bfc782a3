"""Run and check the `mx.fast.metal_kernel` calls of any program in the emulator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .compiler import compiler
from .errors import EmulatorError, Finding, LaunchError, OrderError, RaceError, merged, root_cause
from .kernel import MetalKernel, check_switches, metal_kernel

# ---- the device of `emulate` on a machine without a GPU ----


class PretendedGPU(mx.Device):
    """MLX's CPU device with a GPU's name and type.

    Programs compare a device with `mx.gpu`, which `emulate` sets to `mx.cpu`, or with the type of a GPU. This device
    equals both.
    """

    def __init__(self) -> None:
        super().__init__(mx.cpu)

    @property
    def type(self) -> mx.DeviceType:
        """The type of a GPU."""
        return mx.DeviceType.gpu

    def __repr__(self) -> str:
        return "Device(gpu, 0)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return other == mx.DeviceType.gpu or super().__eq__(other)

    def __hash__(self) -> int:
        return hash(str(self))


BUILDS = ("spaces", "undefined", "races")
SEEDS = (0, 1)


class Call(NamedTuple):
    """One checked call of a kernel."""

    kernel: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of each input
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    runs: int
    seconds: float


@dataclass
class Calls:
    """The kernels and calls that ran within `emulate`.

    Attributes:
        made: the names of all kernels that were created.
        calls: the calls without a mistake, in order.
        findings: the errors of kernels and calls with mistakes, including errors that the program caught.
        notes: maps the name of each kernel with possible mistakes to these mistakes.
    """

    made: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    findings: list[EmulatorError] = field(default_factory=list)
    notes: dict[str, tuple[Finding, ...]] = field(default_factory=dict)


@contextmanager
def emulate(
    *,
    builds: Sequence[str] = BUILDS,
    seeds: Sequence[int] = SEEDS,
    lanes: str = "active",
    suffixes: bool = False,
    layout: str = "any",
    pretend: bool = True,
) -> Iterator[Calls]:
    """Within this context, replace `mx.fast.metal_kernel` in the whole process: its kernels run in the emulator.

    A build is the kernel compiled with a set of checks; a seed determines the order of threads. Each call of a kernel
    runs once per build and seed, but in the build "races" only once. The call raises an error at the first run with
    mistakes. It also raises an error if the results of two runs differ, except for kernels with `atomic_outputs`.
    `mx.compile` is switched off, so compiled functions run op by op. Kernels made before the context, for instance by a
    module that is already imported, are not emulated: import such modules within the context. Kernels made within the
    context stay emulated after it.

    Args:
        builds: any of "spaces", "undefined" and "races"; see `MetalKernel.__call__`.
        seeds: seeds of the orders of threads.
        lanes: as in `MetalKernel.__call__`.
        suffixes: as in `MetalKernel.__call__`.
        layout: as in `MetalKernel.__call__`.
        pretend: on a machine without a Metal GPU, pretend that there is one, so that programs choose their code for
            GPUs. `mx.metal.is_available` returns True, `mx.gpu` is `mx.cpu`, and `mx.device_info` has the keys of an
            Apple GPU. `mx.default_device` returns a device with the name and type of a GPU, even after
            `mx.set_default_device(mx.cpu)`.

    Returns:
        A record of the calls, which is updated by each call.

    Raises:
        CompilerMissingError: there is no clang.
        LaunchError: an argument is wrong.
    """
    compiler()
    if not builds or not seeds:
        raise LaunchError(f"emulate: expected at least one build and one seed, found {builds!r} and {seeds!r}")
    for build in builds:
        for seed in seeds:
            check_switches("emulate", seed, build, lanes, None, layout)
    seen = Calls()
    options = {"lanes": lanes, "suffixes": suffixes, "layout": layout}

    @wraps(metal_kernel)
    def make(*args: Any, **kwargs: Any) -> CheckedKernel:
        try:
            kernel = metal_kernel(*args, **kwargs)
        except EmulatorError as error:
            seen.findings.append(error)
            raise
        seen.made.append(kernel.name)
        return CheckedKernel(kernel, tuple(builds), tuple(seeds), options, seen)

    with ExitStack() as stack:
        stack.enter_context(_replaced(mx.fast, "metal_kernel", make))
        stack.enter_context(_uncompiled())
        if pretend and not mx.metal.is_available():
            stack.enter_context(_replaced(mx.metal, "is_available", pretended))
            stack.enter_context(_replaced(mx, "gpu", mx.cpu))
            stack.enter_context(_replaced(mx, "default_device", PretendedGPU))
            stack.enter_context(_replaced(mx, "device_info", _device_info(mx.device_info)))
        yield seen


class CheckedKernel:
    """A kernel made by `mx.fast.metal_kernel` in `emulate`; each call runs in several builds and orders of threads."""

    def __init__(
        self,
        kernel: MetalKernel,
        builds: Sequence[str],
        seeds: Sequence[int],
        options: Mapping[str, Any],
        seen: Calls,
    ) -> None:
        self._kernel, self._builds, self._seeds, self._options, self._seen = kernel, builds, seeds, options, seen

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._kernel.name

    def __call__(
        self, *, inputs: Sequence[Any], grid: Sequence[int], threadgroup: Sequence[int], **call: Any
    ) -> list[mx.array]:
        """Run and check the kernel; the arguments are those of a kernel of MLX. Raise EmulatorError for a mistake."""
        started = time.perf_counter()
        try:
            results = self._results(dict(call, inputs=inputs, grid=grid, threadgroup=threadgroup))
        except EmulatorError as error:
            self._seen.findings.append(error)
            raise
        kinds = tuple((str(getattr(x, "dtype", type(x).__name__)), tuple(getattr(x, "shape", ()))) for x in inputs)
        runs = sum(1 if build == "races" else len(self._seeds) for build in self._builds)
        seconds = time.perf_counter() - started
        self._seen.calls.append(Call(self.name, kinds, tuple(grid), tuple(threadgroup), runs, seconds))
        return _tied(self.name, inputs, results)

    def _results(self, given: dict[str, Any]) -> list[mx.array]:
        """Run every build and seed, compare results unless outputs are atomic, and return those of the first run."""
        results: list[tuple[str, list[mx.array]]] = []
        for build in self._builds:
            for seed in self._seeds[:1] if build == "races" else self._seeds:
                run = f"seed {seed}" if build == self._builds[0] else f"seed {seed} of build '{build}'"
                results.append((run, self._run(given, build, seed)))
                self._note()
                given["verbose"] = False
                if not self._kernel.atomic_outputs:
                    self._compare(results[0], results[-1], given)
        return results[0][1]

    def _run(self, given: dict[str, Any], build: str, seed: int) -> list[mx.array]:
        def run(build: str) -> list[mx.array]:
            return self._kernel(**given, **self._options, build=build, seed=seed)

        try:
            return run(build)
        except EmulatorError as error:
            raise root_cause(error, build, run) from None

    def _note(self) -> None:
        statistics = self._kernel.statistics
        found = (*self._kernel.notes, *(statistics.notes if statistics else ()))
        if found:
            self._seen.notes[self.name] = merged((*self._seen.notes.get(self.name, ()), *found))

    def _compare(
        self, first: tuple[str, list[mx.array]], other: tuple[str, list[mx.array]], given: dict[str, Any]
    ) -> None:
        """Raise an error if the results of two runs differ.

        If the build "races" finds a race, the error is its RaceError, else an OrderError, which names the two runs.
        """
        for name, one, two in zip(self._kernel.output_names, first[1], other[1], strict=True):
            statistics = self._kernel.statistics
            at = difference(one, two, nearly=bool(statistics and statistics.tensor_operations))
            if at is None:
                continue
            for seed in self._seeds:
                try:
                    self._kernel(**given, **self._options, build="races", seed=seed)
                except RaceError:
                    raise
                except EmulatorError:
                    break  # "races" finds another mistake than a race; report the difference of results
            place = f"{name}[{', '.join(map(str, at))}]"
            raise OrderError(
                f"kernel '{self.name}': {place} is {one[at].item()} with {first[0]}, {two[at].item()} with "
                f"{other[0]}\n  the result depends on the order of threads\n{self._writer(given, name, one, at)}"
                "  write each element from one thread, put a barrier between threads that share memory, and initialise "
                "the memory to which atomics add"
            )

    def _writer(self, given: dict[str, Any], name: str, array: mx.array, at: tuple[int, ...]) -> str:
        """Return a line about the last thread that wrote an element; "" if this thread is unknown."""
        index = int(np.ravel_multi_index(at, tuple(array.shape))) if at else 0
        try:
            self._kernel(**given, **self._options, build="races", seed=self._seeds[0], trace=(name, index))
        except EmulatorError:
            return ""
        statistics = self._kernel.statistics
        found = statistics.writer if statistics else None
        return f"  {found.text.splitlines()[0]}\n" if found else ""


# The largest accepted difference between two results of a kernel with tensor products, relative to the largest absolute
# value. The results may differ, because the order of summation of tensor products is undefined.
_NEARLY = 2**-6


def difference(one: mx.array, other: mx.array, *, nearly: bool = False) -> tuple[int, ...] | None:
    """Return the index of the first different element, or None. NaN equals NaN.

    With `nearly`, differences up to `_NEARLY` are accepted.
    """
    if one.size == 0:
        return None
    a, b = (np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x) for x in (one, other))
    differs = (a != b) & ~((a != a) & (b != b))
    if nearly and np.issubdtype(a.dtype, np.floating):
        with np.errstate(invalid="ignore"):  # the difference of two infinities
            differs &= ~(np.abs(a - b) <= _NEARLY * np.max(np.abs(a), initial=0, where=np.isfinite(a)))
    return first_true(differs) if differs.any() else None


def first_true(mask: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the index of the first true element; there must be one."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _tied(name: str, inputs: Sequence[Any], outputs: list[mx.array]) -> list[mx.array]:
    """Return the outputs as MLX functions of the inputs, so that a gradient raises an error and is not zero."""

    @mx.custom_function
    def results(*_: mx.array) -> list[mx.array]:
        return outputs

    @results.vjp
    def no_gradient(*_: Any) -> None:
        raise LaunchError(
            f"kernel '{name}': MLX has no gradient of a metal_kernel; define one with mx.custom_function and its vjp"
        )

    tied: list[mx.array] = results(*(x for x in inputs if isinstance(x, mx.array)))  # type: ignore[assignment]
    return list(tied)


# ---- replacements of MLX's functions ----


def pretended() -> bool:
    """Return True, in place of `mx.metal.is_available`; kernels/launch.py recognises this function by its name."""
    return True


@contextmanager
def _replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, original)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Within this context, switch `mx.compile` off, because it calls kernels with arrays that have no values yet."""
    was_on = _compiles()
    mx.disable_compile()
    try:
        yield
    finally:
        if was_on:
            mx.enable_compile()


def _compiles() -> bool:
    """Return whether `mx.compile` is on. If so, the argument of a compiled function has no value when it is called."""
    has_values = []

    def look(x: mx.array) -> mx.array:
        try:
            x.item()
            has_values.append(True)
        except ValueError:
            has_values.append(False)
        return x

    mx.compile(look)(mx.array(0))
    return not has_values[0]


def _device_info(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a replacement of `mx.device_info` that adds the keys that MLX reports for an Apple GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = {
        "architecture": "applegpu_g13g",
        "memory_size": memory,
        "max_buffer_length": memory // 2,
        "max_recommended_working_set_size": memory * 3 // 4,
        "resource_limit": 499_000,
    }

    def device_info(*args: Any) -> dict[str, Any]:
        return {**original(*args), **gpu}

    return device_info
