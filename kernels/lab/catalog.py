"""The list of this package's kernels, for `kernels list` and `kernels check`: purpose, requirements, error bounds."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import NamedTuple

from ..cached import cached_property
from ..kernel import Kernel
from ..launch import ExecutorName, Launch
from ..metal.cases import cases
from ..metal.reference import PRODUCT, SEQUENTIAL
from .check import Case, Orders, Progress, Verdict, check_cases, compile_cases
from .run import cuda_text, metal_text


class About(NamedTuple):
    """A kernel's requirements on its arrays, its error bound, and the unit of the bound."""

    needs: str
    bound: float
    unit: str


_ROWS = "K a multiple of 32, 1 to 8 vectors; any number if norm_rows has made x and factors"
_ANY = "K a multiple of 32, any number of vectors"
# Bounds in float32 epsilons (2^-23). PRODUCT and SEQUENTIAL count roundings of 2^-24, half an epsilon each.
_LANES, _ONE_BY_ONE = PRODUCT / 2, SEQUENTIAL / 2
_HALF = "K a multiple of 32, any number of vectors of float16 or bfloat16"
_SUM = "epsilons of sum |w||x|"
# For kernels with this unit, the reference computes an error bound for each element, which `About.bound` multiplies.
_CARRIED = "the reference's bound"
# Maps the name of each kernel to its `About`. The kernels of the ladder (kernels of the same product, from slow to
# fast) come first.
_ABOUT = {
    "thread_per_output": About(_ANY, _ONE_BY_ONE, _SUM),
    "simd_per_row": About(_ANY, _LANES, _SUM),
    "matvec": About(_ANY, _LANES, _SUM),
    "tiles": About(_ANY, _ONE_BY_ONE, _SUM),
    "prompt_product": About(_HALF, 1, _CARRIED),
    "prompt_product_tensors": About(_HALF, 1, _CARRIED),
    "dense": About("float32, K from 8 on, any number of vectors", _LANES, _SUM),
    "norm_project": About(_ROWS, 1, _CARRIED),
    "norm_qkv": About(_ROWS, 1, _CARRIED),
    "norm_gate_up": About(_ROWS, 1, _CARRIED),
    "norm_rows": About(_ANY, 1, _CARRIED),
    "project_add": About(_ANY + ", a float32 residual", 1, _CARRIED),
    "head_norm_rope": About("an even head width from 8 on, any number of tokens", 1, _CARRIED),
    "attention": About(
        "a head width of 8, 16, ... 256, 320, 384, ... 576; float32, float16, bfloat16 or Q8_0 keys", 1, _CARRIED
    ),
    "embed_rows": About("K a multiple of 32, int32 ids", 0, "exact"),
    "dequantize": About("K a multiple of 32, float32 or float16 results", 0, "exact"),
}


@dataclass(frozen=True)
class Entry:
    """A kernel of the list."""

    name: str

    @cached_property
    def module(self) -> ModuleType:
        """The module `kernels.metal.NAME`: the kernel's text, grid and reference, and the function that launches it."""
        return importlib.import_module(f"..metal.{self.name}", __package__)

    @property
    def kernel(self) -> Kernel:
        """The kernel's text."""
        kernel: Kernel = self.module.KERNEL
        return kernel

    @property
    def rung(self) -> int | None:
        """The kernel's number in the ladder of products, from slow to fast; None for other kernels."""
        found = re.match(r"Rung (\d+)", self._first_line)
        return int(found[1]) if found else None

    @property
    def summary(self) -> str:
        """The first paragraph of the module's docstring, without "Rung N of the Q8_0 ladder: "."""
        text = re.sub(r"^Rung \d+ of the Q8_0 ladder: ", "", self._first_line)
        return text[:1].lower() + text[1:].rstrip(".") if not text[1:2].isupper() else text.rstrip(".")

    @property
    def about(self) -> About:
        """The kernel's requirements and error bound."""
        return _ABOUT[self.name]

    @property
    def _first_line(self) -> str:
        paragraph = (self.module.__doc__ or "").strip().split("\n\n")[0]
        return " ".join(paragraph.split())

    @cached_property
    def n_cases(self) -> int:
        """The number of launches that `cases` returns."""
        return len(cases(self.name))

    def cases(self) -> list[Case]:
        """Return the kernel's launches in all shapes, with expected results."""
        return [Case(case.label, case.launch(), case.expected) for case in cases(self.name)]

    def typical(self) -> Launch:
        """Return the launch with the most input elements.

        Launches with small inputs are not typical: MLX passes arrays of under 8 elements in `constant` memory, and
        larger arrays, such as those of models, in `device` memory.
        """
        return max((case.launch() for case in cases(self.name)), key=lambda launch: sum(x.size for x in launch.inputs))

    def metal_text(self) -> str:
        """Return the text that MLX passes to Metal for a typical launch, without MLX's preamble."""
        return metal_text(self.typical())

    def cuda_text(self) -> str:
        """Return the kernel's header and body, translated to CUDA, without the signature that MLX generates."""
        return cuda_text(self.kernel)


def check_entries(
    every: Sequence[Entry], executor: ExecutorName, orders: Orders, progress: Progress | None = None
) -> list[Verdict]:
    """Check kernels in all shapes. In the emulator, later kernels are compiled while earlier kernels run.

    The backend `cuda` runs the same kernels, so the emulator checks two rules of CUDA, whatever `orders` says: all
    lanes take part in SIMD-group operations, and floating-point literals have a suffix.
    """
    orders = replace(orders, lanes="all", suffixes=True)
    total, done, verdicts = sum(entry.n_cases for entry in every), 0, list[Verdict]()
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // len(orders.builds)))
    try:
        made = [(entry, entry.cases()) for entry in every]
        compiled = [pool.submit(compile_cases, cases, orders) for _, cases in made if executor == "emulator"]
        for i, (entry, cases) in enumerate(made):
            started = time.perf_counter()
            if compiled:
                compiled[i].result()
            waited = time.perf_counter() - started
            report = progress and partial(_report_part, progress, done, total)
            verdict = check_cases(entry.name, cases, executor, orders, bound=entry.about.bound, progress=report)
            verdict.seconds, verdict.compile_seconds = verdict.seconds + waited, verdict.compile_seconds + waited
            verdicts.append(verdict)
            done += entry.n_cases
    finally:
        pool.shutdown(cancel_futures=True)
    return verdicts


def _report_part(report: Progress, before: int, total: int, done: int, _: int) -> None:
    report(before + done, total)


def entries() -> list[Entry]:
    """Return all kernels, the kernels of the ladder first."""
    return [Entry(name) for name in _ABOUT]


def entry(name: str) -> Entry:
    """Return the kernel with this name; raise KeyError if no kernel has the name."""
    if name not in _ABOUT:
        raise KeyError(name)
    return Entry(name)
