"""Checks of the arguments of experiments and of `check`, before anything is compiled.

Every function raises ValueError with one line: the place, the expected and the found value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import index
from typing import Any

from ..emulator.compiler import BUILDS
from ..emulator.kernel import LANES
from ..emulator.runtime import MAX_THREADS
from ..launch import Size


def check_names(kernel: str, names: Sequence[str]) -> None:
    """Refuse arrays, axes and constants that share a name, or that have a name that Metal does not accept."""
    for name in names:
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise ValueError(f"{kernel}: expected names of letters, digits and _, found {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"{kernel}: expected one meaning per name, found {name} for two arrays, axes or constants")


def check_constants(kernel: str, constants: Mapping[str, Any]) -> None:
    """Refuse constants that cannot be template arguments in Metal."""
    for name, value in constants.items():
        if not isinstance(value, int):
            raise ValueError(
                f"{kernel}: expected int or bool constants, found {name}={value!r}; write a float into the source, "
                "or pass it as an input of one element"
            )


def check_least(kernel: str, least: Any, axes: Mapping[str, int]) -> None:
    """Refuse smallest sizes that are not whole numbers >= 1, or of unknown axes."""
    right = isinstance(least, Mapping) and all(
        name in axes and _is_whole(size) and size >= 1 for name, size in least.items()
    )
    if not right:
        raise ValueError(f"{kernel}.least: expected a number from 1 on for any of {', '.join(axes)}, found {least!r}")


def check_threadgroup(kernel: str, threadgroup: Any) -> Size:
    """Return the threads of a threadgroup in each direction."""
    size = three(threadgroup, f"{kernel}.threadgroup")
    if prod(size) > MAX_THREADS:
        raise ValueError(
            f"{kernel}.threadgroup: expected at most {MAX_THREADS:,} threads, found {prod(size):,}: {size}"
        )
    return size


def three(size: Any, where: str, *, least: int = 1) -> Size:
    """Return one to three whole numbers as three, padded with ones."""
    given = size if isinstance(size, tuple | list) else (size,)
    try:
        whole = [index(n) for n in given]
    except TypeError:
        whole = []
    if not 1 <= len(whole) <= 3 or min(whole) < least:
        hint = "; divide with //" if any(isinstance(n, float) for n in given) else ""
        raise ValueError(f"{where}: expected one to three whole numbers >= {least}, found {size!r}{hint}")
    x, y, z = (*whole, 1, 1)[:3]
    return x, y, z


def check_parameters(function: Callable[..., Any], known: Sequence[str], where: str) -> list[str]:
    """Return the names of a function's parameters; refuse unknown names."""
    if not callable(function):
        raise ValueError(f"{where}: expected a function, found {function!r}")
    wanted = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{where}: expected parameters among {', '.join(known)}, found {', '.join(unknown)}")
    return wanted


def check_data(values: Any, names: Sequence[str], where: str) -> Mapping[str, Any]:
    """Return the values of inputs by name; refuse other types and unknown names."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a dict of arrays by name, found {type(values).__name__}")
    unknown = [str(name) for name in values if name not in names]
    if unknown:
        raise ValueError(f"{where}: expected inputs among {', '.join(names)}, found {', '.join(unknown)}")
    return values


def check_switches(kernel: str, lanes: Any, suffixes: Any) -> None:
    """Refuse switches of the emulator with unknown values."""
    if lanes not in LANES:
        raise ValueError(f"{kernel}: expected lanes to be one of {', '.join(LANES)}, found {lanes!r}")
    if not isinstance(suffixes, bool):
        raise ValueError(f"{kernel}: expected suffixes to be True or False, found {suffixes!r}")


def check_orders(kernel: str, seeds: Any, builds: Any) -> None:
    """Refuse seeds and builds of other types, and unknown builds."""
    if isinstance(builds, str) or any(build not in BUILDS for build in builds):
        raise ValueError(f"check {kernel}: expected builds, a list of {', '.join(BUILDS)}, found {builds!r}")
    if isinstance(seeds, int | str) or any(not isinstance(seed, int) or not 0 <= seed < 1 << 32 for seed in seeds):
        raise ValueError(f"check {kernel}: expected seeds, a list of numbers from 0 on, below 2**32, found {seeds!r}")


def check_sizes(kernel: str, sizes: Any) -> None:
    """Refuse sizes that are neither a dict of lists nor a list of dicts."""
    if isinstance(sizes, Mapping):
        every = [[size] if _is_whole(size) else size for size in sizes.values()]
        right = all(isinstance(size, Sequence | range) and all(map(_is_whole, size)) for size in every)
    else:
        right = isinstance(sizes, Sequence) and all(
            isinstance(one, Mapping) and all(map(_is_whole, one.values())) for one in sizes
        )
    if not right:
        raise ValueError(
            f"check {kernel}: expected sizes such as {{'N': [1, 33]}} or [{{'N': 1}}, {{'N': 33}}], found {sizes!r}"
        )


def _is_whole(size: Any) -> bool:
    return hasattr(size, "__index__") and not isinstance(size, bool)
