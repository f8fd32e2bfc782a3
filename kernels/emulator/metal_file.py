"""Compile the kernels of a whole .metal file in every build, without running them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import lint
from .builds import BUILDS
from .compiler import check_syntax
from .errors import CompileError, LintError
from .findings import Finding, Place
from .metal_library import WholeKernel, compile_together, library
from .source import place_threadgroup_memory
from .text import with_suffixes

# How clang's errors name address spaces.
_SPACE = re.compile(r"address space|__(?:local|global|constant)\b")


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
        CompileError: the file cannot be preprocessed, has no kernels, all of it does not compile, or `lint` refuses it.
    """
    try:
        lint.check(file.name, "", file.read_text(encoding="utf-8", errors="replace"), suffixes=False)
    except LintError as error:
        text = str(error).replace(f"kernel '{file.name}'", str(file)).replace("body, line", f"{file.name}, line")
        raise LintError(text) from None
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


def address_space_notes(file: Path, folders: Sequence[Path] = ()) -> tuple[Finding, ...]:
    """Return a note for each line of a file in which clang, with address spaces, finds a wrong one.

    They are notes because C++ lacks part of Metal's rules: it has no member functions for objects in other spaces.
    """
    text = place_threadgroup_memory(file.read_text(encoding="utf-8", errors="replace"))
    head = f'#include <msl/all.h>\n#line 1 "{file.name}"\n'
    try:
        check_syntax(f"{head}{with_suffixes(text)}\n", [file.resolve().parent, *folders])
    except CompileError as error:
        lines = re.findall(rf"^{re.escape(file.name)}:(\d+):\d+: error: (.*)", str(error), re.MULTILINE)
        wrong = [(int(line), what) for line, what in lines if _SPACE.search(what)]
        return tuple(_note(file.name, *one) for one in wrong)
    return ()


def _note(file: str, line: int, what: str) -> Finding:
    for ours, metal in (("__local", "threadgroup"), ("__global", "device"), ("__constant", "constant")):
        what = what.replace(ours, metal)
    advice = "check the pointer's address space: Metal converts none to another"
    return Finding(
        "address space", True, f"{file}, line {line}: {what}\n{advice}", Place((0, 0, 0), (0, 0, 0), file, line)
    )
