"""A pytest plugin with a fixture, `emulated_metal`, and an option, `--emulate-metal`, that emulate Metal kernels.

Load the plugin with `pytest -p mlx_engine.kernels.emulator.pytest_plugin`, or name this module in `pytest_plugins` of
the topmost conftest.py. The fixture checks kernels that a test creates. For kernels that a module creates when it is
imported, use the option, which takes effect before pytest imports modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .intercept import Calls, emulate

_STACK = pytest.StashKey[ExitStack]()
_CALLS = pytest.StashKey[Calls]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--emulate-metal`."""
    parser.addoption(
        "--emulate-metal", action="store_true", help="Run and check all mx.fast.metal_kernel calls in the emulator."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start `emulate` before any test module is imported."""
    if config.getoption("--emulate-metal"):
        stack = config.stash[_STACK] = ExitStack()
        config.stash[_CALLS] = stack.enter_context(emulate())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many calls were checked, so that the user notices if no kernel was called."""
    if _CALLS in config.stash:
        seen = config.stash[_CALLS]
        kernels = len({call.kernel for call in seen.calls})
        counts = f"{kernels} kernels, {len(seen.calls):,} calls, {len(seen.findings)} mistakes"
        terminalreporter.write_line(f"checked in the Metal emulator: {counts}")
        for finding in dict.fromkeys(map(str, seen.findings)):  # including errors that the program caught
            terminalreporter.write_line(finding)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End `emulate` after the last test."""
    if _STACK in config.stash:
        config.stash[_STACK].close()


@pytest.fixture
def emulated_metal() -> Iterator[Calls]:
    """Run the `mx.fast.metal_kernel` calls of a test in the emulator; the fixture's value lists the calls."""
    with emulate() as calls:
        yield calls
