"""A case: functions of another project that launch kernels, with data, and what they must return."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

# A maker of arrays of random numbers, given their lengths.
Maker = Callable[..., mx.array]
# What a case returns: arrays in any nesting of lists, tuples and mappings, and what they must be.
Results = tuple[Any, Any]


class Checkout:
    """A checkout whose files can be imported one by one.

    The `__init__.py` of a package that leads to a file is not run: it often imports what the kernel does not need, such
    as tokenizers. `package` runs it.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self.folder = folder
        self._root = (folder / root).resolve()
        sys.path.insert(0, str(self._root))

    def module(self, name: str) -> ModuleType:
        """Import the module with this dotted name."""
        parts = name.split(".")
        for n in range(1, len(parts)):
            package = ".".join(parts[:n])
            if package not in sys.modules:
                empty = ModuleType(package)
                empty.__path__ = [str(self._root.joinpath(*parts[:n]))]
                sys.modules[package] = empty
        return importlib.import_module(name)

    def package(self, name: str) -> ModuleType:
        """Import a package as Python does, with its `__init__.py`."""
        return importlib.import_module(name)

    def text(self, path: str) -> str:
        """Return the text of a file."""
        return (self.folder / path).read_text()


@dataclass(frozen=True)
class Case:
    """See the module.

    Attributes:
        repository: owner and name.
        run: takes the checkout; returns results and what they must be.
        tolerance: the largest difference, relative to the largest expected value of an array.
        bug: what is wrong with the kernel, if it has a bug: then the emulator must report it.
    """

    repository: str
    run: Callable[[Checkout], Results]
    tolerance: float = 1e-5
    bug: str | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.run.__name__


@dataclass(frozen=True)
class Suite:
    """A project's own tests, which know what its kernels must return.

    Attributes:
        repository: owner and name.
        name: a name for the table.
        tests: files, folders and tests, relative to the checkout; `*` and `?` stand for any letters.
        options: arguments of pytest, for instance `--deselect` of a test that needs another library.
        bug: what is wrong with their kernels, if they have a bug: then the emulator must report it.
    """

    repository: str
    name: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    bug: str | None = None


def normal(seed: int = 0) -> Maker:
    """Return a maker of arrays of normal random numbers."""
    rng = np.random.default_rng(seed)
    return lambda *shape: mx.array(rng.standard_normal(shape, np.float32))


CASES: list[Case] = []
SUITES: list[Suite] = []


def case(repository: str, *, tolerance: float = 1e-5, bug: str | None = None) -> Callable[..., Any]:
    """Register a function as a case of a repository."""

    def register(run: Callable[[Checkout], Results]) -> Callable[[Checkout], Results]:
        CASES.append(Case(repository, run, tolerance, bug))
        return run

    return register


def suite(repository: str, name: str, *tests: str, options: tuple[str, ...] = (), bug: str | None = None) -> None:
    """Register a project's own tests."""
    SUITES.append(Suite(repository, name, tests, options, bug))
