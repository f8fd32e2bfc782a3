"""The test files that are near a source file: those that name its module, and those listed here.

Listed are tests of code whose lines no record of executed lines has: code that is compiled, or runs in a process that
a test starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# They look for the code that the bug has replaced, or at its hash, and would catch every bug.
NOT_RUN = ("test_mutants.py", "test_benchmarks_page.py")

# By the beginning of a source file's path.
UNRECORDED = {
    "kernels/cpu/": (
        "tests/contract/test_ops.py",
        "tests/contract/test_whole_model.py",
        "tests/unit/test_compiled_program.py",
        "tests/unit/test_cpu_attention.py",
        "tests/unit/test_cpu_blocks.py",
        "tests/unit/test_cpu_gemm.py",
        "tests/unit/test_cpu_linear.py",
    ),
    "mlx_engine/commands/signals.py": ("tests/unit/test_drafts.py",),
}


def is_recorded(file: str) -> bool:
    """Return whether a record of executed lines has the lines of a source file."""
    return not file.startswith(tuple(UNRECORDED))


def near(root: Path, file: str, seconds: Mapping[str, float]) -> list[str]:
    """Return the test files near a source file: first those that name it, then those listed, the shortest first.

    Args:
        root: of the checkout.
        file: the source file, from the root.
        seconds: how long test files take.
    """

    def shortest_first(files: list[str]) -> list[str]:
        return sorted(files, key=lambda test: seconds.get(test, 0.0))

    naming = shortest_first(_naming(root, file))
    listed = [test for start, tests in UNRECORDED.items() if file.startswith(start) for test in tests]
    return [*naming, *(test for test in shortest_first(listed) if test not in naming)]


def _naming(root: Path, file: str) -> list[str]:
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    # `kernels/metal/x.h.metal` and other files that are no modules are named by their file name.
    words = (module, f"from {package} import {name}") if file.endswith(".py") else (Path(file).name,)
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [
        test.relative_to(root).as_posix()
        for test in tests
        if test.name not in NOT_RUN and any(word in test.read_text() for word in words)
    ]
