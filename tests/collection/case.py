"""A case: functions of another project that launch kernels, with data, and what they must return."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

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


CASES: list[Case] = []


def case(repository: str, *, tolerance: float = 1e-5, bug: str | None = None) -> Callable[..., Any]:
    """Register a function as a case of a repository."""

    def register(run: Callable[[Checkout], Results]) -> Callable[[Checkout], Results]:
        CASES.append(Case(repository, run, tolerance, bug))
        return run

    return register
