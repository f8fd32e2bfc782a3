"""Load prebuilt machine code from a wheel: one shared library per kind of processor.

`python -m tools.wheel` makes the libraries, and a manifest with the digests of the kernels' source and of each library.
A library is used if the installed source and the library's file match the digests in the manifest, and if this
processor has all instructions that the library needs. This module needs neither Numba nor llvmlite.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER, MANIFEST = Path(__file__).parents[1] / "prebuilt", "manifest.json"


class Target(NamedTuple):
    """A kind of processor.

    Attributes:
        machine: the machine's name on Linux, such as "x86_64" or "aarch64".
        processor: LLVM's name of the processor, as in NUMBA_CPU_NAME.
        features: additional features, as in NUMBA_CPU_FEATURES.
        needs: the instruction sets that the code needs, by their names in Linux.
    """

    machine: str
    processor: str
    features: str
    needs: frozenset[str]

    @property
    def triple(self) -> str:
        """LLVM's target triple."""
        return "arm64-apple-macosx11.0" if sys.platform == "darwin" else f"{self.machine}-unknown-linux-gnu"


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The instruction sets of code for LLVM's processor cortex-a76: dot products, float16 arithmetic, atomic instructions.
_DOT = frozenset({"asimd", "asimddp", "asimdhp", "atomics"})
# Maps the names of targets to the targets. Of the targets for one machine, the fastest is first. Measured on a Zen 5
# with `--activations i16`: x86-64-v4-vnni takes 0.86 of the prefill time of x86-64-v4. The targets for AVX2 have LLVM's
# processor `haswell`, because this code takes 0.86 of the decode time of code for LLVM's processor "x86-64-v3".
TARGETS = {
    "x86-64-v4-vnni": Target("x86_64", "x86-64-v4", "+avx512vnni,+avx512vbmi", _V4 | {"avx512_vnni", "avx512vbmi"}),
    "x86-64-v4": Target("x86_64", "x86-64-v4", "", _V4),
    "x86-64-v3-vnni": Target("x86_64", "haswell", "+avxvnni", _V3 | {"avx_vnni"}),
    "x86-64-v3": Target("x86_64", "haswell", "", _V3),
    "arm64-dot": Target("aarch64", "cortex-a76", "+neon,+dotprod", _DOT),
    "arm64": Target("aarch64", "cortex-a72", "+neon", frozenset({"asimd"})),
}


class SharedCode:
    """A loaded shared library for the target `name`.

    `parts` has the names of the groups of kernels in the library: keys of `library.MODULES`, block formats, and block
    formats followed by `library.FIXED_END`.
    """

    def __init__(self, file: Path, name: str, parts: frozenset[str]) -> None:
        self._library, self.name, self.parts = ctypes.CDLL(str(file)), name, parts

    def address(self, name: str) -> int:
        """Return the address of the machine code of an exported function; 0 if no function has this name."""
        try:
            return ctypes.cast(self._library[name], ctypes.c_void_p).value or 0
        except AttributeError:
            return 0


def find(source: str) -> SharedCode | str:
    """Load the fastest prebuilt code for this processor; return the reason if none can be loaded.

    `source` is the digest of the source from which the code must have been compiled.
    """
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text())
        made_from, targets = manifest["source"], dict[str, Any](manifest["targets"])
    except (OSError, ValueError, LookupError, TypeError):
        return "no machine code came with this package"
    if made_from != source:
        return "the machine code that came with this package is of another version of the kernels"
    reason = f"no machine code came with this package for this processor ({platform.machine()})"
    if os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES"):
        reason += " with these NUMBA_CPU_NAME and NUMBA_CPU_FEATURES"
    for name, target in TARGETS.items():
        if name in targets and _fits(target):
            found = _loaded(name, targets[name])
            if isinstance(found, SharedCode):
                return found
            reason = found
    return reason


def _fits(target: Target) -> bool:
    """Return whether code for the target runs on this processor, and Numba's environment variables permit the target.

    If NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set, both must have the values of the target.
    """
    chosen, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if (chosen or features) and (chosen, features or "") != (target.processor, target.features):
        return False
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return target.machine == machine and target.needs <= instruction_sets()


def _loaded(name: str, listed: Mapping[str, Any]) -> SharedCode | str:
    """Load the library of target `name`, or return why it cannot be used. `listed` is the manifest's entry."""
    file = FOLDER / listed["file"]
    try:
        if hashlib.sha256(file.read_bytes()).hexdigest() != listed["sha256"]:
            return f"{file} has been changed or is damaged"
        return SharedCode(file, name, frozenset(listed["parts"]))
    except OSError as error:
        return f"{file} cannot be loaded: {error}"


def instruction_sets() -> frozenset[str]:
    """Return the instruction sets that the processor and the operating system support, by their names in Linux.

    On x86-64, Linux lists an instruction set only if Linux also saves its registers. On arm64, return only instruction
    sets that a target needs.
    """
    if sys.platform == "darwin":  # all Apple silicon has the instruction sets of `_DOT`
        return _DOT if platform.machine() == "arm64" else frozenset()
    if platform.machine() in ("aarch64", "arm64"):
        bits, places = _auxiliary(16), {"asimd": 1, "atomics": 8, "asimdhp": 10, "asimddp": 20}
        return frozenset(name for name, bit in places.items() if bits >> bit & 1)
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))
    except OSError:
        return frozenset()


def _auxiliary(kind: int) -> int:
    """Return an entry of Linux's auxiliary vector; 0 if it is missing.

    Entry 16 is AT_HWCAP. On arm64, each of its bits stands for an instruction set.
    """
    try:
        read = ctypes.CDLL(None).getauxval
    except AttributeError:
        return 0
    read.argtypes, read.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return int(read(kind))
