"""Compile a whole .metal file with the emulator's compiler, without running its kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kernels.emulator import lint
from kernels.emulator.compiler import check_syntax
from kernels.emulator.errors import CompileError
from kernels.emulator.source import place_threadgroup_memory
from kernels.emulator.text import code_only, with_suffixes

_KERNEL = re.compile(r"(?:\bkernel|\[\[\s*kernel\s*\]\])\s+void\s+(\w+)\s*\(")


def compile_metal_file(file: Path, folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of the kernels in a file that compiles.

    Args:
        file: the file; its `#include "..."` are looked for in its folder.
        folders: where else they are looked for.

    Raises:
        CompileError: clang or `lint` refuses the file, or it has no kernels.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    names = _KERNEL.findall(code_only(text))
    if not names:
        raise CompileError(
            f"{file}: expected functions `kernel void NAME(...)`, found none; a kernel's body alone, as "
            "mx.fast.metal_kernel takes it, is checked with its arrays: see kernels.Experiment"
        )
    lint.check(file.name, "", text, suffixes=False)
    placed = f'#include <msl/all.h>\n#line 1 "{file.name}"\n{with_suffixes(place_threadgroup_memory(text))}\n'
    try:
        check_syntax(placed, [file.resolve().parent, *folders])
    except CompileError as error:
        raise CompileError(f"{file} does not compile\n{error}") from None
    return names
