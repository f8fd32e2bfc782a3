"""Sound kernels in which bugs are planted, each with launches and what they must return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from kernels.emulator import emulate, library
from kernels.kernel import Kernel
from kernels.lab.arrays import in_numpy
from kernels.lab.catalog import entries
from kernels.lab.check import EPSILON, Case
from kernels.lab.metal_experiment import MetalLaunch
from kernels.launch import Launch
from kernels.metal.reference import Expected
from tests.collection import whole
from tests.collection.case import CASES, Checkout
from tests.collection.plant.bug import Bug
from tests.collection.repositories import Repository
from tests.collection.run import load_cases, outcome
from tests.collection.suite_plugin import noted

# The allowed error in float32 epsilons of the largest number, as of kernels.Experiment.
BOUND = 4.0
# Of one of our kernels, so many of its shapes, all small.
SHAPES = 4
OURS = "mlx_engine"


class Subject(Protocol):
    """A sound kernel.

    Attributes:
        name: repository, case and kernel.
        cases: its launches.
        bound: see `check_cases`.
    """

    name: str
    cases: Sequence[Case]
    bound: float

    def planted(self, bug: Bug, folder: Path) -> list[Case]:
        """Return the cases with a bug; `folder` is an empty one for files."""


@dataclass
class Body:
    """A kernel of mx.fast.metal_kernel, ours or a third party's."""

    name: str
    cases: Sequence[Case]
    bound: float = BOUND

    def planted(self, bug: Bug, folder: Path) -> list[Case]:
        """Return the cases with a bug."""
        return [replace(case, launch=_planted(case.launch, bug)) for case in self.cases]


def _planted(launch: Any, bug: Bug) -> Launch:
    where = "header" if bug.header else "source"
    kernel = replace(launch.kernel, **{where: bug.edited(getattr(launch.kernel, where))})
    changed: Launch = replace(launch, kernel=kernel, **bug.call)
    return changed


@dataclass
class WholeKernelOf:
    """A kernel of a .metal file of a checkout."""

    name: str
    root: Path
    made: whole.Whole
    results: dict[int, Any]
    bound: float = BOUND

    @property
    def cases(self) -> list[Case]:
        """Its launch."""
        return [self._case(self.made, library(self.made.file, self.made.folders))]

    def planted(self, bug: Bug, folder: Path) -> list[Case]:
        """Return the launch with a bug: `folder` has a copy of the edited file, and is searched first."""
        file = self.root / bug.file if bug.file else self.made.file
        copy = folder / file.relative_to(self.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(bug.edited(file.read_text()))
        main = self.made.file if bug.file else copy
        folders = [folder, self.made.file.parent, *self.made.folders]
        return [self._case(self.made._replace(**bug.call), library(main, folders))]

    def _case(self, made: whole.Whole, file: Any) -> Case:
        kernel, x, y = file.function(made.kernel, made.constants), made.grid, made.threadgroup
        outputs = tuple(i for i in self.results if hasattr(made.buffers[i], "shape"))
        launch = MetalLaunch(kernel, made.buffers, (x[0], x[1], x[2]), (y[0], y[1], y[2]), made.memory, outputs)
        return Case(f"grid={tuple(x)}", launch, partial(_expected, [in_numpy(self.results[i]) for i in outputs]))


def subjects_of(repository: Repository, folder: Path) -> Iterator[Subject]:
    """Yield the kernels of the collection's cases that are right: the first launch of each.

    Expected are the results of the sound kernel, which the case has compared with a reference.
    """
    load_cases()
    root = (folder / repository.folder).resolve()
    checkout = Checkout(root, repository.root)
    with emulate() as seen, noted(root) as places, _launches() as made:
        for one in CASES:
            if one.repository != repository.path or one.bug:
                continue
            for each in (made, seen.findings, places):
                each.clear()
            if not outcome(one, checkout, seen, places).good:
                continue
            for launch, results in made.values():
                name = f"{repository.path} {one.name} {launch.kernel.name}"
                case = Case(f"grid={launch.grid}", launch, partial(_expected, [in_numpy(x) for x in results]))
                yield Body(name, [case])
            for wholes, written in whole.launched:
                yield WholeKernelOf(f"{repository.path} {one.name} {wholes.kernel}", root, wholes, dict(written))


def our_subjects() -> Iterator[Subject]:
    """Yield the kernels of this project, with a few of their shapes and their twins."""
    for entry in entries():
        by_size = sorted(entry.cases(), key=lambda case: sum(x.size for x in case.launch.inputs))  # type: ignore[union-attr]
        step = max(1, len(by_size) // (2 * SHAPES))
        yield Body(f"{OURS} {entry.name}", by_size[step::step][:SHAPES], entry.about.bound)


def _expected(results: Sequence[Any]) -> list[Expected]:
    values = [np.asarray(one, np.float64) for one in results]
    scales = [np.max(np.abs(one), initial=0, where=np.isfinite(one)) for one in values]
    return [Expected(x, np.full(x.shape, BOUND * EPSILON * scale)) for x, scale in zip(values, scales, strict=True)]


@contextmanager
def _launches() -> Iterator[dict[Kernel, tuple[Launch, list[mx.array]]]]:
    """Record the first launch of each kernel that is made here, with its results."""
    made: dict[Kernel, tuple[Launch, list[mx.array]]] = {}
    make = mx.fast.metal_kernel

    def metal_kernel(*words: Any, compile_options: Any = None, **options: Any) -> Any:
        run, kernel = make(*words, **options), Kernel(*words, **options)

        def call(**given: Any) -> Any:
            results = run(**given)
            made.setdefault(kernel, (_launch(kernel, **given), results))
            return results

        return call

    mx.fast.metal_kernel = metal_kernel
    try:
        yield made
    finally:
        mx.fast.metal_kernel = make


def _launch(
    kernel: Kernel, *, inputs: Sequence[Any], grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any,
    template: Any = (), init_value: float | None = None, **_: Any,
) -> Launch:  # fmt: skip
    arrays = [one if isinstance(one, mx.array) else mx.array(one) for one in inputs]
    shapes = [tuple(shape) for shape in output_shapes]
    return Launch(
        kernel, arrays, tuple(template or ()), tuple(grid), tuple(threadgroup), shapes, list(output_dtypes), init_value
    )
