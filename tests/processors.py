"""Run the tests of everything that is compiled for a processor, for several processors.

    python -m tests.processors                             all targets
    python -m tests.processors --list                      what the targets are, and whether this machine executes them
    python -m tests.processors --target haswell -k linear  one target, some tests
    python -m tests.processors --target arm64 --arm64-root ~/arm64

The tests are tests/unit/test_cpu_*.py (the compiled CPU kernels), tests/emulator and tests/kernels. Each target runs
them in a process of its own: Numba compiles for the target, and NumPy and its BLAS use no wider instructions than the
target has. Numba needs two variables: with NUMBA_CPU_NAME alone it compiles for the features of the machine at hand.

Before the tests, the exported kernels are compiled for the target and their assembly is searched for vector registers:
a target with AVX2 must name no register of AVX-512, a target with AVX-512 must use zmm. If the machine lacks an
extension of the target, the tests do not run, and the table says "compiled only".

`generic` has no half-precision conversions: the kernels are refused, and NumPy runs instead. Its tests are those of the
backends' contract.

`arm64` runs in QEMU's user mode, from a folder with an arm64 Debian and arm64 wheels; `--arm64-root` or the variable
ARM64_ROOT names the folder. If the folder is not prepared, the commands that prepare it are printed. Kernels for the
emulator are compiled by this machine's zig. All tests take half an hour there; tests that measure time may fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from llvmlite import binding

from tests.assembly import AFFINE

ROOT = Path(__file__).parents[1]
VARIABLE = "ARM64_ROOT"
# Where Debian's Python looks for packages, in every process that a test starts, too.
WHEELS = "usr/lib/python3/dist-packages"
FOLDERS = ("tests/emulator", "tests/kernels")
# Variables that choose a processor; a target's own replace them.
CHOOSING = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES")

_AVX2 = ("avx2", "f16c", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ZEN5 = (*_AVX512, "avx512bf16", "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "gfni")

_PREPARE = """\
  apt-get install mmdebstrap qemu-user-static
  mmdebstrap --variant=extract --architectures=arm64 --include=python3,libgomp1,libstdc++6 bookworm {root}
  {python} -m pip install --target {root}/{wheels} --python-version 3.11 --implementation cp --only-binary=:all: \\
    --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_35_aarch64 \\
    numpy numba 'mlx[cpu]' pytest hypothesis threadpoolctl tokenizers jinja2 typer rich huggingface_hub gguf"""


@dataclass(frozen=True)
class Target:
    """A processor to compile for.

    Attributes:
        name: what `--target` calls it; for x86 LLVM's name.
        needs: the extensions without which its code cannot be executed, by LLVM's names.
        widest: the widest vector registers that the kernels must use, and may use; None where nothing is expected.
        blas: OpenBLAS's name for such a processor.
        hidden: how the names begin of the groups of instructions that NumPy must not use.
        tests: files and folders to run besides those of the emulator; globs.
    """

    name: str
    needs: tuple[str, ...] = ()
    widest: str | None = None
    blas: str | None = None
    hidden: tuple[str, ...] = ()
    tests: tuple[str, ...] = ("tests/unit/test_cpu_*.py",)

    def environment(self) -> dict[str, str]:
        """Return this process's variables with the target's."""
        variables = {name: value for name, value in os.environ.items() if name not in CHOOSING}
        if self.name in ("native", "arm64"):
            return variables
        variables |= {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": ""}
        if self.blas:
            variables["OPENBLAS_CORETYPE"] = self.blas
        found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
        if hidden := [name for name in found if name.startswith(self.hidden)] if self.hidden else []:
            variables["NPY_DISABLE_CPU_FEATURES"] = " ".join(hidden)
        return variables

    def lacking(self) -> list[str]:
        """Return what this machine lacks to execute the target's code."""
        host = binding.get_host_cpu_features()
        return [name for name in self.needs if not host.get(name)]


TARGETS = (
    Target("haswell", _AVX2, "ymm", "Haswell", ("AVX512", "X86_V4")),
    Target("alderlake", (*_AVX2, "avxvnni", "gfni"), "ymm", "Haswell", ("AVX512", "X86_V4")),
    Target("skylake-avx512", _AVX512, "zmm", "SkylakeX", ("AVX512_ICL", "AVX512_SPR")),
    Target("znver5", _ZEN5, "zmm", "SkylakeX"),
    # Tests that compile a single kernel would end the process: LLVM calls a conversion that is not there.
    Target(
        "generic",
        (),
        None,
        "Nehalem",
        ("AVX", "FMA", "X86_V3", "X86_V4"),
        ("tests/contract", "tests/unit/test_blas.py"),
    ),
    Target("native"),
    Target("arm64"),
)


@dataclass
class Outcome:
    """What became of a target: a row of the table."""

    target: str
    said: str
    registers: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a test, or the compilation, has failed."""
        return bool(self.counts["failed"])

    def row(self) -> list[str]:
        """Return the cells."""
        counts = [str(self.counts[name]) for name in ("passed", "failed", "skipped")]
        return [self.target, self.said, self.registers, *counts, f"{self.seconds:.0f}"]


# ---- compiling, to look at the code ----


def print_registers(part: str) -> None:
    """Compile a part of `kernels.cpu`; print how often each kind of vector register is named, as JSON.

    Run in a process of its own: Numba compiles nothing else there afterwards.
    """
    from kernels.cpu.build import exports

    texts: list[str] = []

    def emit(machine: binding.TargetMachine, module: binding.ModuleRef) -> bytes:
        texts.append(machine.emit_assembly(module))
        return b""

    binding.TargetMachine.emit_object = emit
    exports.compiled(exports.Translator.start(), part)
    print(json.dumps(registers("".join(texts))))


def registers(assembly: str) -> Counter[str]:
    """Count the vector registers of x86 assembly; those that only AVX-512 has, masks among them, as "evex" as well."""
    found = Counter(f"{letter}mm" for letter in re.findall(r"%([xyz])mm\d", assembly))
    found["evex"] = len(re.findall(r"%zmm|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])\b", assembly))
    return found


def compiled_registers(environment: dict[str, str]) -> Counter[str]:
    """Compile all exported kernels for the processor that the environment names; of MLX's formats, some.

    Raises:
        RuntimeError: with the last line that the compiling process has said.
    """
    from kernels.cpu.build import library

    total: Counter[str] = Counter()
    panels = (f"{name}{library.FIXED_END}" for name in (*library.FORMATS[1:], *AFFINE))
    for part in (*library.MODULES, *library.FORMATS, *AFFINE, *panels):
        code = f"from tests.processors import print_registers; print_registers({part!r})"
        command = [sys.executable, "-c", code]
        child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if child.returncode:
            raise RuntimeError((child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
        total.update(json.loads(child.stdout))
    return total


def misused(target: Target, found: Counter[str]) -> str | None:
    """Return what is wrong with the registers of a target's code, or None."""
    if target.widest and not found[target.widest]:
        return f"no {target.widest} register in the kernels"
    if target.widest == "ymm" and found["evex"]:
        return f"{found['evex']:,} registers of AVX-512 in the kernels"
    return None


# ---- running ----


def tests(target: Target) -> list[str]:
    """Return the files and folders to run, relative to the root."""
    found = [path for pattern in target.tests for path in sorted(ROOT.glob(pattern))]
    return [*(str(path.relative_to(ROOT)) for path in found), *FOLDERS]


def run_tests(target: Target, python: str, environment: dict[str, str], keyword: str | None) -> Counter[str]:
    """Run the tests; pytest prints what fails. A process that dies counts as one failure."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests(target)]
        child = subprocess.run(
            [*command, *(["-k", keyword] if keyword else [])], cwd=ROOT, env=environment, check=False
        )
        if not report.exists():
            print(f"pytest ended with exit code {child.returncode}")
            return Counter(failed=1)
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    ran, errors, failures, skipped = (int(suite.get(name, 0)) for name in ("tests", "errors", "failures", "skipped"))
    return Counter(passed=ran - errors - failures - skipped, failed=errors + failures, skipped=skipped)


def on_x86(target: Target, keyword: str | None) -> Outcome:
    """Compile for an x86 target, and run the tests where this machine can."""
    if platform.machine() not in ("x86_64", "AMD64") and target.name != "native":
        return Outcome(target.name, f"left out: this machine is {platform.machine()}")
    environment, outcome = target.environment(), Outcome(target.name, "ran")
    if target.name == "generic":
        outcome.said = "ran: NumPy, since the kernels need f16c"
    else:
        try:
            found = compiled_registers(environment)
        except RuntimeError as error:
            return Outcome(target.name, f"does not compile: {error}", counts=Counter(failed=1))
        outcome.registers = ", ".join(f"{name} {found[name]:,}" for name in ("ymm", "zmm") if found[name])
        if wrong := misused(target, found):
            return Outcome(target.name, wrong, outcome.registers, Counter(failed=1))
    if missing := target.lacking():
        outcome.said = f"compiled only: the host lacks {', '.join(missing)}"
    else:
        outcome.counts = run_tests(target, sys.executable, environment, keyword)
    return outcome


# ---- arm64 ----


def on_arm64(target: Target, root: Path | None, keyword: str | None) -> Outcome:
    """Run the tests in QEMU; where the folder is not prepared, print how it is."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    pythons = sorted(root.glob("usr/bin/python3.[0-9]*")) if root else []
    if not root or not pythons or not (root / WHEELS / "numba").is_dir() or not qemu:
        print(f"arm64: expected qemu-aarch64-static, and a prepared folder (--arm64-root, or {VARIABLE}):")
        print(_PREPARE.format(root=root or "DIR", wheels=WHEELS, python=sys.executable))
        return Outcome("arm64", "left out: not prepared" if qemu else "left out: no QEMU")
    # A program that the tests start is started by this machine's kernel: Python's name must be one that it can run.
    python = root / "python"
    command = shlex.join([qemu, "-0", str(python), "-L", str(root), str(pythons[0])])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    environment = target.environment()
    environment |= {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(ROOT)}
    if zig := cross_compiler():
        environment["MLX_ENGINE_CLANG"] = zig
    return Outcome("arm64", "ran in QEMU", counts=run_tests(target, str(python), environment, keyword))


def cross_compiler() -> str | None:
    """Return the command that compiles emulated kernels for arm64 on this machine, or None without zig."""
    from kernels.emulator.compiler import compiler, unavailable

    if unavailable() or not compiler().command[0].endswith("zig"):
        return None
    return " ".join([*compiler().command, "-target", "aarch64-linux-gnu"])


# ---- the command ----


def status(target: Target, root: Path | None) -> str:
    """Return what `--list` says of a target."""
    if target.name == "arm64":
        return f"in QEMU, from {root}" if root else "in QEMU, from a folder that --arm64-root names"
    missing = target.lacking()
    return f"compiled only: the host lacks {', '.join(missing)}" if missing else "is executed"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    """Run the targets one at a time; the exit code is 1 if anything has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description=(__doc__ or "").split("\n")[0])
    names = [target.name for target in TARGETS]
    parser.add_argument("--target", action="append", choices=names, help="run this target only; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the targets and whether the host executes them")
    parser.add_argument("-k", dest="keyword", help="run only tests that match, as pytest's -k")
    parser.add_argument(
        "--arm64-root", type=Path, default=os.environ.get(VARIABLE), help=f"folder with an arm64 system; or ${VARIABLE}"
    )
    given = parser.parse_args()
    root = Path(given.arm64_root).absolute() if given.arm64_root else None
    chosen = [target for target in TARGETS if not given.target or target.name in given.target]
    if given.list:
        print(table([[target.name, status(target, root)] for target in chosen]))
        return 0
    outcomes = []
    for target in chosen:
        print(f"==== {target.name}", flush=True)
        start = time.monotonic()
        outcome = on_arm64(target, root, given.keyword) if target.name == "arm64" else on_x86(target, given.keyword)
        outcome.seconds = time.monotonic() - start
        outcomes.append(outcome)
    head = ["target", "what was done", "registers", "passed", "failed", "skipped", "seconds"]
    print(table([head, *(outcome.row() for outcome in outcomes)]))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
