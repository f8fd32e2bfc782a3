"""The tests near a source file: those in files that name its module, and those listed here.

Listed are tests of code whose lines no record of executed lines has, because the code is compiled or runs in a process
that a test starts; and tests that are slower than many others that execute the same lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

# They look for the code that the bug has replaced, or at its hash, and would catch every bug.
NOT_RUN = ("test_mutants.py", "test_benchmarks_page.py")

_OPS = "tests/contract/test_ops.py -k "
_FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")
# By the beginning of a source file's path: arguments of pytest, run in this order. A bug in a kernel changes the digest
# of all, so each format that a test needs is compiled anew. The first tests need few formats.
LISTED = {
    **{f"kernels/cpu/formats/{name}.py": (f"{_OPS}{name}",) for name in _FORMATS},
    "kernels/cpu/products/activations.py": ("tests/golden/test_gpt_oss.py",),
    "kernels/cpu/formats/affine": ("tests/unit/test_cpu_linear.py -k AFFINE", "tests/golden/test_mlx_folders.py"),
    "kernels/cpu/attention": ("tests/unit/test_cpu_attention.py",),
    "kernels/cpu/states/convolution.py": (f"{_OPS}short_conv",),
    "kernels/cpu/states/delta_rule.py": (f"{_OPS}delta_net",),
    "kernels/cpu/products/experts.py": (f"{_OPS}norm_experts_add",),
    "kernels/cpu/build/pool.py": ("tests/unit/test_fork.py",),
    "kernels/cpu/program.py": ("tests/unit/test_compiled_program.py", "tests/golden/test_gemma4.py"),
    "kernels/cpu/formats/rows.py": ("tests/unit/test_cpu_bounds.py -k Q8_0",),
    "kernels/cpu/formats/sums.py": ("tests/unit/test_cpu_assembly.py",),
    "kernels/cpu/products/tile.py": ("tests/unit/test_cpu_gemm.py",),
    "kernels/cpu/": (
        f"{_OPS}'project_add or norm_gate_up or norm_up or norm_head'",
        "tests/contract/test_ops.py",
        "tests/unit/test_cpu_attention.py",
        "tests/unit/test_cpu_linear.py",
        "tests/unit/test_compiled_program.py",
    ),
    "mlx_engine/backends/cpu/backend.py": ("tests/unit/test_cpu_backends.py", "tests/unit/test_cpu_pool.py"),
    "mlx_engine/backends/mlx/device.py": ("tests/unit/test_engine_close.py",),
    "mlx_engine/backends/session_guard.py": ("tests/unit/test_fork.py",),
    "mlx_engine/commands/__init__.py": ("tests/unit/test_completion.py",),
    "mlx_engine/commands/chat.py": ("tests/unit/test_command_chat.py",),
    "mlx_engine/commands/console.py": ("tests/unit/test_drafts.py",),
    "mlx_engine/engine.py": ("tests/unit/test_bos.py",),
    "mlx_engine/serve/server.py": ("tests/serve/test_engine_thread.py",),
    "mlx_engine/serve/worker.py": ("tests/serve/test_engine_thread.py",),
}


def is_compiled(file: str) -> bool:
    """Return whether a source file is compiled, so that no test executes its lines."""
    return file.startswith("kernels/cpu/")


def near(root: Path, file: str, seconds: Mapping[str, float]) -> list[list[str]]:
    """Return the arguments of one or more runs of pytest: the files that name a module, and then the listed tests.

    Args:
        root: of the checkout.
        file: the source file of the module, from the root.
        seconds: how long test files take; the file of the module's name is first in its run, then the shortest.
    """
    own = f"test_{Path(file).stem}.py"
    naming = sorted(_naming(root, file), key=lambda test: (Path(test).name != own, seconds.get(test, 0.0)))
    listed = [run for start, runs in LISTED.items() if file.startswith(start) for run in runs]
    return [run for run in (naming, *map(shlex.split, listed)) if run]


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
