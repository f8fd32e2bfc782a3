"""What every test may rely on."""

import functools
import gc
import logging
import re
from collections.abc import Iterator, Sequence
from zlib import crc32

import pytest
import typer.main
from hypothesis import HealthCheck, Phase, settings

from kernels.emulator.compiler import BUILDS, UNOPTIMIZED
from mlx_engine.machine import memory as limits
from mlx_engine.observe import log

# Emulated kernels have the same bits without optimisation, and clang takes a seventh of the time, which is most of what
# the tests on emulated `metal` would take. The tests of the emulator and the lab run optimised code, as users do
# (`optimized_kernels`).
OPTIMIZED = BUILDS["spaces"]
BUILDS["spaces"] = UNOPTIMIZED

# Typer makes all commands and their options anew whenever an application is called, which takes 20 ms, and would be
# most of what the tests of commands take. A user's process calls it once. `typer.testing` imports this function, too.
typer.main.get_command = functools.cache(typer.main.get_command)

# They take several times as long as the others.
SLOW_BACKENDS = re.compile("scalar|emulated")

# Random examples are the same in every run, and no test measures time: a machine may be busy.
settings.register_profile(
    "default tests",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default tests")
# For planted bugs: nobody reads the smallest example that finds them (`--hypothesis-profile`).
settings.register_profile(
    "no shrinking", settings.get_profile("default tests"), phases=[Phase.explicit, Phase.generate]
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most combinations of tests marked `each_value` or `some` as slow."""
    combinations: dict[object, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and marks & {"each_value", "some"} and "slow" not in marks:
            combinations.setdefault((item.parent, item.originalname), []).append(item)
    for of_test in combinations.values():
        some = of_test[0].get_closest_marker("some")
        chosen = each_value(of_test) if some is None else various(of_test, some.args[0])
        for item in set(of_test).difference(chosen):
            item.add_marker(pytest.mark.slow)


def each_value(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return a few items that have every value of every argument at least once, the same ones in every run."""
    values = {item: {(name, repr(value)) for name, value in item.callspec.params.items()} for item in items}
    missing, chosen = set().union(*values.values()), []
    # Items in no order: in order, the first backend would have most architectures. Of items with as many new values,
    # those on fast backends come first.
    mixed = sorted(items, key=lambda item: (bool(SLOW_BACKENDS.search(item.name)), crc32(item.name.encode())))
    while missing:
        chosen.append(max(mixed, key=lambda item: len(values[item] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def various(items: Sequence[pytest.Function], n: int) -> list[pytest.Function]:
    """Return `n` items, or all if there are fewer, with as many different values as possible."""
    chosen: list[pytest.Function] = []
    while len(chosen) < min(n, len(items)):
        chosen += each_value([item for item in items if item not in chosen])
    return chosen[:n]


# Collecting tests makes many objects that stay; to look through them again and again takes a tenth of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave the many objects that pytest has made of all tests out of the collections to come, which take half a second
    with them. Collect less often, too: beside the types of the HTTP clients, collections took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def untouched_log() -> Iterator[None]:
    """Commands configure the log of the whole process; each test finds it as nobody has touched it."""
    logger = logging.getLogger("mlx_engine")
    before = logger.level, logger.propagate, list(logger.handlers)
    log._warned.clear()
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1], before[2]


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model have more threads than this machine has cores."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 8)


@pytest.fixture(scope="module")
def optimized_kernels() -> Iterator[None]:
    """Compile emulated kernels as users do."""
    BUILDS["spaces"] = OPTIMIZED
    yield
    BUILDS["spaces"] = UNOPTIMIZED
