"""Whole .metal kernels of a checkout, launched with buffers, in all builds of the emulator."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels.emulator import EmulatorError, Library, library
from kernels.emulator.errors import root_cause
from tests.collection.case import Checkout
from tests.collection.compare import values

_TYPES = {"float": "f4", "bool": "?", "int": "i4"} | {
    f"{sign}int{bits}_t": f"{kind}{bits // 8}" for sign, kind in (("", "i"), ("u", "u")) for bits in (8, 16, 32, 64)
}


class Whole(NamedTuple):
    """A launch of a kernel of a .metal file of a checkout, which can be made again with another text."""

    file: Path
    folders: tuple[Path, ...]
    kernel: str
    constants: Mapping[int | str, float] | None
    buffers: Mapping[int, Any]
    grid: Sequence[int]
    threadgroup: Sequence[int]
    memory: Mapping[int, int]


# The launches of the current case, with their results.
launched: list[tuple[Whole, dict[int, Any]]] = []


@cache
def _library(file: Path, folders: tuple[Path, ...]) -> Library:
    return library(file, folders)


def launch(
    checkout: Checkout,
    file: str,
    kernel: str,
    buffers: Sequence[Any] | Mapping[int, Any],
    *,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    constants: Mapping[int | str, float] | None = None,
    memory: Mapping[int, int] | None = None,
    include: Sequence[str] = (".",),
    builds: Sequence[str] = ("spaces", "undefined", "races"),
) -> list[Any]:
    """Run a kernel in several builds and two orders of threads; return the contents of its outputs, all equal."""
    folders = tuple(checkout.folder / folder for folder in include)
    function = _library(checkout.folder / file, folders).function(kernel, constants)
    by_index = dict(buffers) if isinstance(buffers, Mapping) else dict(enumerate(buffers))
    whole = Whole(checkout.folder / file, folders, kernel, constants, by_index, grid, threadgroup, memory or {})
    results: list[list[Any]] = []
    written: dict[int, Any] = {}
    launched.append((whole, written))
    for seed, build in enumerate(builds):
        again = partial(
            function, buffers, grid=grid, threadgroup=threadgroup, threadgroup_memory=memory, seed=min(seed, 1)
        )
        try:
            written.update(again(build=build))
        except EmulatorError as error:
            raise root_cause(error, build, lambda other, again=again: again(build=other)) from None
        results.append(list(written.values()))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(values(one), values(another), "runs differ")
    return results[0]


def structure(checkout: Checkout, header: str, name: str, **values: Any) -> Any:
    """Return a C structure of a header as a NumPy value; members that are not given are 0."""
    text = checkout.text(header)
    end = re.search(rf"\}}\s*{name}\s*;", text)
    if end is None:
        raise ValueError(f"{header}: expected `typedef struct {{ ... }} {name};`")
    body = text[text.rindex("{", 0, end.start()) + 1 : end.start()]
    members = re.findall(r"^\s*(\w+)\s+(\w+)\s*(?:\[(\d+)\])?\s*;", body, re.MULTILINE)
    kind = np.dtype([(m, _TYPES[t], int(n)) if n else (m, _TYPES[t]) for t, m, n in members], align=True)
    made = np.zeros((), kind)
    for key, value in values.items():
        made[key] = value
    return made
