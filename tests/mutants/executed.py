"""Which tests execute which lines, recorded while all of them run without a bug.

As a pytest plugin (`-p tests.mutants.executed`) it records into the folder that the environment names; `Executed` reads
the records. Lines that only compiled code or other processes execute are not seen.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage, CoverageData

FOLDER = "MLX_ENGINE_EXECUTED"
SECONDS = ".seconds.json"
# A bug is caught by one of the first tests, or rarely at all.
MOST_TESTS, MOST_SECONDS = 400, 20.0


class Recorder:
    """The plugin's hooks in one process: a context of coverage per test, and the seconds of each."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._file = folder / str(os.getpid())
        measured = [f"{root}/mlx_engine/*", f"{root}/kernels/*"]
        self._coverage = Coverage(str(self._file), include=measured, config_file=False, messages=False)
        self._coverage.start()
        self._is_traced = sys.gettrace() is not None
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.perf_counter() - start
            self._coverage.switch_context("")
            if self._is_traced and sys.gettrace() is None:
                raise RuntimeError(f"{item.nodeid}: expected sys.settrace as before, found it removed; restore it")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._file.with_suffix(SECONDS).write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that runs tests: with pytest-xdist that is each worker."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER]), config.rootpath))


_N_FILES = """
    select context, count(distinct file_id) from line_bits join context on context.id = context_id group by context
"""


class Executed:
    """What a run recorded: the tests that execute lines of a file.

    Args:
        folder: with the records.
        root: of the checkout that ran.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._root = root
        records = list(folder.glob(f"*{SECONDS}"))
        self._seconds = {test: s for record in records for test, s in json.loads(record.read_text()).items()}
        self._data = [CoverageData(str(record).removesuffix(SECONDS)) for record in records]
        for data in self._data:
            data.read()
        # How many source files each test executes. Those that execute few are about what these do.
        self._n_files = Counter[str]()
        for data in self._data:
            with closing(sqlite3.connect(data.data_filename())) as base:
                self._n_files.update(dict(base.execute(_N_FILES)))

    @property
    def seconds_of_files(self) -> Mapping[str, float]:
        """How long the tests of each test file took."""
        files = defaultdict[str, float](float)
        for test, seconds in self._seconds.items():
            files[test.partition("::")[0]] += seconds
        return files

    def tests(self, file: str, lines: Collection[int]) -> list[str]:
        """Return the tests that execute one of the lines, or else the file, within the limits.

        Those that execute the fewest files come first. Parameters of one test function execute nearly the same: one
        test of each function comes before the others.
        """
        contexts = [(line, test) for line, test in self._contexts(file) if test in self._seconds]
        found = {test for line, test in contexts if line in lines} or {test for _, test in contexts}
        n_of_function, in_order = Counter[str](), []
        for test in sorted(found, key=lambda test: (self._n_files[test], self._seconds[test], test)):
            function = test.partition("[")[0]
            in_order.append((n_of_function[function], self._n_files[test], self._seconds[test], test))
            n_of_function[function] += 1
        chosen, left = [], MOST_SECONDS
        for _, _, seconds, test in sorted(in_order)[:MOST_TESTS]:
            left -= seconds
            if left < 0:
                break
            chosen.append(test)
        return chosen

    def _contexts(self, file: str) -> Iterator[tuple[int, str]]:
        for data in self._data:
            for line, tests in data.contexts_by_lineno(str(self._root / file)).items():
                for test in tests:
                    yield line, test
