"""For pytest: note which kernels of a project ran under `--emulate-metal`, and write them to a file.

The plugin is loaded by its bare name, because the projects have packages named `tests` of their own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from kernels.emulator import EmulatorError

# Per place in a project that made kernels which ran, file and line: what the emulator reported.
Places = dict[str, list[str]]


@contextmanager
def noted(root: Path) -> Iterator[Places]:
    """Note where the kernels that run are made; to be entered within `emulate`, whose kernels these are."""
    places: Places = {}
    make = mx.fast.metal_kernel

    def metal_kernel(*words: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}".removeprefix(f"{root}/")
        with _reported(places, place):
            kernel = make(*words, **options)

        def call(**launch: Any) -> Any:
            places.setdefault(place, [])
            with _reported(places, place):
                return kernel(**launch)

        return call

    mx.fast.metal_kernel = metal_kernel
    try:
        yield places
    finally:
        mx.fast.metal_kernel = make


@contextmanager
def _reported(places: Places, place: str) -> Iterator[None]:
    try:
        yield
    except EmulatorError as error:
        text = f"{type(error).__name__}: {error}"
        if text not in places.setdefault(place, []):
            places[place].append(text)
        raise


def installed() -> None:
    """Let a checkout, which is not installed, find a version of its own."""
    version = importlib.metadata.version

    def found(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            return "0"

    importlib.metadata.version = found


def imported_as_on_a_mac(package: str) -> None:
    """Import a package that refuses other systems than macOS."""
    was = sys.platform
    sys.platform = "darwin"
    try:
        importlib.import_module(package)
    finally:
        sys.platform = was


def left_empty(name: str) -> None:
    """Put an empty package in the place of one whose `__init__.py` imports what the kernels do not need."""
    parent, _, _ = name.rpartition(".")
    paths = sys.modules[parent].__path__ if parent else sys.path
    found = importlib.machinery.PathFinder.find_spec(name, paths)
    if found is None or found.submodule_search_locations is None:
        raise pytest.UsageError(f"--left-empty {name}: no such package")
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package


class Anything(type):
    """The type of a class that has every method; none of them does anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class StandIn(ModuleType):
    """A module that has every class; none of them is used."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules that are not there."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return a specification of every module of the package."""
        if name.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


@pytest.fixture
def metal_default_device() -> None:
    """Do nothing: olmlx has a fixture of this name beside others that import a server."""


class Reporter:
    """Counts tests and kernels, and writes them at the end."""

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.stack, self.tests, self.failed = file, ExitStack(), Counter[str](), dict[str, str]()
        self.places = self.stack.enter_context(noted(root))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, or what failed before or after it."""
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.outcome] += 1
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-300:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as a failed test."""
        if report.failed:
            self.tests["failed"] += 1
            self.failed[report.nodeid] = report.longreprtext[-300:]

    def pytest_unconfigure(self) -> None:
        """Write what ran."""
        self.stack.close()
        self.file.write_text(json.dumps({"places": self.places, "tests": self.tests, "failed": self.failed}))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--kernels-to", type=Path, help="the file to write")
    parser.addoption("--left-empty", action="append", default=[], help="packages whose __init__.py is not run")
    parser.addoption("--stand-in", action="append", default=[], help="missing modules of which nothing is used")
    parser.addoption("--default-gpu", action="store_true", help="the default device has the name of a GPU")
    parser.addoption("--as-on-a-mac", action="append", default=[], help="packages that only macOS may import")


@pytest.hookimpl(trylast=True)  # after --emulate-metal
def pytest_configure(config: pytest.Config) -> None:
    """Begin before any test module is imported."""
    installed()
    if config.getoption("--default-gpu"):
        mx.default_device = lambda: mx.Device(mx.DeviceType.gpu)
        mx.set_default_device = mx.set_default_stream = mx.new_stream = lambda _: None  # everything is on the CPU
    for name in config.getoption("--stand-in"):
        if importlib.util.find_spec(name) is None:
            sys.meta_path.append(StandIns(name))
    for package in config.getoption("--left-empty"):
        left_empty(package)
    config.pluginmanager.register(Reporter(config.getoption("--kernels-to"), config.rootpath), "kernels-to")
    for package in config.getoption("--as-on-a-mac"):
        imported_as_on_a_mac(package)
