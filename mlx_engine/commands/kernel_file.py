"""`kernels check FILE`: somebody's Python program or .metal file, checked in the emulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mlx_engine.commands.values import print_json
from mlx_engine.errors import OptionError


class FileOptions(NamedTuple):
    """The switches of the emulator that the command offers."""

    seeds: int
    races: bool
    lanes: str
    suffixes: bool
    include: tuple[Path, ...]


def check_kernel_file(file: Path, arguments: Sequence[str], options: FileOptions, *, json: bool) -> bool:
    """Check a file, print the report, and return whether everything was right.

    With `json`, what the program prints goes to stderr.

    Raises:
        OptionError: there is no such file, a switch has an unknown value, or there is no compiler.
    """
    from mlx_engine.kernels.emulator import unavailable
    from mlx_engine.kernels.emulator.kernel import LANES
    from mlx_engine.kernels.lab.check import Orders
    from mlx_engine.kernels.lab.check_file import check_file
    from mlx_engine.kernels.lab.run import BUILDS

    reason = unavailable()
    if reason is not None:
        raise OptionError(option="FILE", expected="a machine with the emulator", found=reason)
    if options.lanes not in LANES:
        raise OptionError(option="--lanes", expected=f"one of {', '.join(LANES)}", found=options.lanes)
    if not file.is_file():
        raise OptionError(option="FILE", expected="a Python file or a .metal file", found=str(file))
    if file.suffix == ".metal" and arguments and not Path(arguments[0]).is_file():
        wanted = "a Python file with kernels.MetalExperiment objects"
        raise OptionError(option="FILE", expected=wanted, found=arguments[0])
    builds = BUILDS if options.races else BUILDS[:-1]
    orders = Orders(range(options.seeds), builds, options.lanes, options.suffixes)
    with redirect_stdout(sys.stderr if json else sys.stdout):
        report = check_file(file, arguments, orders=orders, folders=options.include)
    if json:
        print_json({**asdict(report), "passed": report.passed})
    else:
        print(report)
    return report.passed
