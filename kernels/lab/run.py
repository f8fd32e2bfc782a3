"""Run one launch on a given executor; in the emulator, with a given order of threads and a given build.

A build is a way to compile a kernel for the emulator. It determines which checks the emulator makes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import mlx.core as mx

from ..emulator import Finding, MetalKernel
from ..emulator.runtime import Statistics
from ..kernel import Kernel
from ..launch import ExecutorName, Launch, built, header, translated
from .metal_experiment import MetalLaunch

# The default builds. "spaces" checks bounds and barriers, "undefined" checks these and undefined behaviour,
# "races" checks data races.
BUILDS = ("spaces", "undefined", "races")
# The builds to use without optimisation. "spaces" is left out, because "undefined" then differs only by more checks.
UNOPTIMIZED_BUILDS = BUILDS[1:]
# Seeds of the order of threads: 0 is ascending, 1 descending, larger seeds shuffle the threads.
SEEDS = (0, 1, 2)


def promise(launch: Launch, executor: ExecutorName, **options: Any) -> list[mx.array]:
    """Return a launch's outputs: lazy on a GPU, already computed in the emulator. A GPU ignores `options`."""
    return built(launch.kernel, executor)(
        inputs=launch.inputs,
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
        **(options if executor == "emulator" else {}),
    )


def run(launch: Launch | MetalLaunch, executor: ExecutorName, **options: Any) -> list[Any]:
    """Run a launch and return its computed outputs."""
    if isinstance(launch, MetalLaunch):
        return launch.run(**options)
    outputs = promise(launch, executor, **options)
    mx.eval(outputs)
    return outputs


def emulated(kernel: Kernel) -> MetalKernel:
    """Return the emulator's object for a kernel."""
    return cast(MetalKernel, built(kernel, "emulator"))


def statistics_of(launch: Launch | MetalLaunch) -> Statistics:
    """Return the statistics of the last run of the launch's kernel in the emulator."""
    kernel = launch.kernel if isinstance(launch, MetalLaunch) else emulated(launch.kernel)
    return cast(Statistics, kernel.statistics)


def notes_of(launch: Launch | MetalLaunch) -> tuple[Finding, ...]:
    """Return the notes (possible mistakes) of the kernel's last emulated run; for a `Launch`, add those on its text."""
    of_text = () if isinstance(launch, MetalLaunch) else emulated(launch.kernel).notes
    return (*of_text, *statistics_of(launch).notes)


def prepare(
    launches: Iterable[Launch | MetalLaunch], builds: Iterable[str] = BUILDS, *, suffixes: bool = False,
    optimize: bool = True,
) -> None:  # fmt: skip
    """Compile kernels for the emulator; all template instantiations of a kernel are compiled together.

    The kernel of a `MetalLaunch` is skipped: it is compiled when it runs. Without `optimize`, compilation takes a tenth
    of the time, but launches run several times slower.
    """
    wanted: dict[Kernel, list[Any]] = defaultdict(list)
    for launch in launches:
        if not isinstance(launch, MetalLaunch):
            wanted[launch.kernel].append((launch.inputs, launch.output_dtypes, list(launch.template)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(emulated(kernel).prepare, instances, build=build, suffixes=suffixes, optimize=optimize)
            for kernel, instances in wanted.items()
            for build in builds
        ]
    for job in jobs:
        job.result()


def counted(launch: Launch) -> dict[str, int]:
    """Run a launch in the emulator and return its operation counts, with the names and units of `bench.Counts`."""
    run(launch, "emulator")
    found = statistics_of(launch)
    return {
        "threads": found.threads,
        "threadgroups": found.threadgroups,
        "simd_operations": found.simd_operations // 32,
        "barriers": found.barriers * found.threadgroups // found.threads,
        "threadgroup_bytes": found.threadgroup_bytes,
    }


def metal_text(launch: Launch) -> str:
    """Return the text that MLX passes to Metal for this launch, without MLX's preamble."""
    return emulated(launch.kernel).text(launch.inputs, launch.output_dtypes, list(launch.template))


def cuda_text(kernel: Kernel) -> str:
    """Return the header and the body as CUDA text, without the signature, which MLX adds."""
    return f"{header()}{translated(kernel.header)}\n{translated(kernel.source)}"
