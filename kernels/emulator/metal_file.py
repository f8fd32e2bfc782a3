"""Compile the kernels of a whole .metal file in every build, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.emulator.compiler import BUILDS
from kernels.emulator.errors import CompileError
from kernels.emulator.metal_library import WholeKernel, compile_together, library


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel function that was compiled.

    Attributes:
        name: the kernel's name; of a template with several instantiations, the first one's, which was compiled.
        others: the names of the other instantiations.
        error: why it does not compile, with its lines; empty if it compiles in every build.
    """

    name: str
    others: tuple[str, ...] = ()
    error: str = ""


def compile_metal_file(file: Path, folders: Sequence[Path] = ()) -> list[CompiledKernel]:
    """Compile the first instantiation of every kernel function of a file in every build.

    Args:
        file: the file; its `#include "..."` are looked for in its folder.
        folders: where else they are looked for.

    Raises:
        CompileError: the file cannot be preprocessed, has no kernels, or all of it does not compile.
    """
    kernels = library(file, folders)
    names: dict[str, list[str]] = {}
    for name in kernels.names:
        names.setdefault(kernels.template_of(name), []).append(name)
    errors = dict.fromkeys(names, "")
    for build in BUILDS:
        right = {template: kernels.function(its[0]) for template, its in names.items() if not errors[template]}
        errors |= _errors(right, build)
        if all(errors.values()) and len(set(errors.values())) == 1:
            raise CompileError(f"{file} {next(iter(errors.values()))}")
    return [CompiledKernel(its[0], tuple(its[1:]), errors[template]) for template, its in names.items()]


def _errors(kernels: dict[str, WholeKernel], build: str) -> dict[str, str]:
    """Return the errors of those kernels that do not compile: all together first, which is faster."""
    try:
        if kernels:
            compile_together(list(kernels.values()), build)
    except CompileError as error:
        if len(kernels) == 1:
            return dict.fromkeys(kernels, f"does not compile in the build '{build}'\n{error}")
        found: dict[str, str] = {}
        for template, kernel in kernels.items():
            found |= _errors({template: kernel}, build)
        return found
    return {}
