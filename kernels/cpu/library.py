"""The library of compiled kernels: machine code that is cached on disk and loaded without a compiler.

Only the first process that needs the kernels compiles them, with Numba. All others use LLVM's loader alone, which
starts faster and takes less memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from llvmlite import binding

from kernels.folder import cache_folder

# The functions that Python calls, and the types of their arguments: i is an integer or an address, f a float64.
ENTRIES = {
    "work_until_idle": "iii",
    "project": "iiiiiii",
    "norm_rope_pair": "iiiiiiiiiiii",
    "put_pair": "iiiiiiiiiiiii",
    "attend": "iiiiiiiiiiiiiiifii",
    "run_steps": "iiiiiiiii",
    "embed": "iiiiiii",
    "sum_exp": "iifi",
    "short_conv": "iiiiiiiiiiiii",
    "sigmoid_gate": "iiiiiiiii",
    "delta_net": "iiiiiiiiiiiii",
}
_TYPES: dict[str, Any] = {"i": ctypes.c_int64, "f": ctypes.c_double}

# Half-precision scales are widened by the f16c instructions, which x86 has since 2012. Without them LLVM would call a
# library function that the process may not have.
_NEEDED_ON_X86 = ("f16c", "fma", "avx2")
_WIDEN = "define float @widen(half %x) {\n  %y = fpext half %x to float\n  ret float %y\n}"
_CALLED = (b"__extendhfsf2", b"__gnu_h2f_ieee")


def lacking() -> str | None:
    """Return why the kernels cannot run on this processor, or the one that Numba's variables choose; else None."""
    chosen, told = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if not binding.get_process_triple().startswith(("x86_64", "i686")):
        return None
    if chosen or told is not None:
        # A named processor has its own features (`jit.py`); without a name the features of this processor are used.
        own = "" if chosen else binding.get_host_cpu_features().flatten()
        name = chosen or binding.get_host_cpu_name()
        is_able = _widens(name, own if told is None else told)
        return None if is_able else f"the processor that Numba is told to compile for ({name}) lacks f16c"
    features = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED_ON_X86 if not features.get(name)]
    return f"the processor ({binding.get_host_cpu_name()}) lacks {', '.join(missing)}" if missing else None


def _widens(processor: str, features: str) -> bool:
    """Return whether LLVM widens a half with an instruction on such a processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    code = target.create_target_machine(cpu=processor, features=features).emit_object(binding.parse_assembly(_WIDEN))
    return not any(name in code for name in _CALLED)


# ---- where compiled code is kept ----


def _digest() -> str:
    """Return a digest of the kernels' source. Numba's own cache would miss a change in a function that a kernel calls.

    The source may be in an archive, or exist as bytecode alone.
    """
    files = [file for file in resources.files("kernels.cpu").iterdir() if file.name.endswith((".py", ".pyc"))]
    files.sort(key=lambda file: file.name)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@cache
def folder() -> Path:
    """Return the folder for compiled code of this version of the source; it does not change within a process."""
    return cache_folder("kernels", given=os.environ.get("NUMBA_CACHE_DIR")) / _digest()


def code_file() -> Path:
    """Return the path of the machine code for this processor, this LLVM and Numba's variables; it may not exist yet."""
    processor = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    told = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR")
    compiler = binding.get_process_triple(), binding.get_host_cpu_features().flatten(), binding.llvm_version_info, told
    target = hashlib.sha256(repr(compiler).encode()).hexdigest()[:16]
    return folder() / f"{processor}-{target}.code"


# ---- loading ----

# Bytes of the checksum before the code, and of the size before each of its object files.
_CHECK, _SIZE = hashlib.sha256().digest_size, 8


def sealed(code: bytes) -> bytes:
    """Return the code with a checksum before it."""
    return hashlib.sha256(code).digest() + code


def opened(content: bytes) -> bytes | None:
    """Return sealed code without its checksum, or None if it is damaged: LLVM would abort the process."""
    code = content[_CHECK:]
    return code if hashlib.sha256(code).digest() == content[:_CHECK] else None


def joined(objects: Iterable[bytes]) -> bytes:
    """Return object files concatenated, each after its size."""
    return b"".join(len(file).to_bytes(_SIZE, "little") + file for file in objects)


def _objects(code: bytes) -> Iterator[bytes]:
    """Return the object files of concatenated code."""
    at = 0
    while at < len(code):
        size = int.from_bytes(code[at : at + _SIZE], "little")
        yield code[at + _SIZE : at + _SIZE + size]
        at += _SIZE + size


class Library:
    """The loaded kernels: entries as functions, tasks as addresses.

    Attributes: one function per name in `ENTRIES`. It returns nothing and runs without the interpreter's lock.
    """

    work_until_idle: Callable[..., None]
    project: Callable[..., None]
    norm_rope_pair: Callable[..., None]
    put_pair: Callable[..., None]
    attend: Callable[..., None]
    run_steps: Callable[..., None]
    embed: Callable[..., None]
    sum_exp: Callable[..., None]
    short_conv: Callable[..., None]
    sigmoid_gate: Callable[..., None]
    delta_net: Callable[..., None]

    def __init__(self, code: bytes) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
        # The engine owns the code's memory.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        for file in _objects(code):
            self._engine.add_object_file(binding.ObjectFileRef.from_data(file))
        self._engine.finalize_object()
        for name, letters in ENTRIES.items():
            kind: Any = ctypes.CFUNCTYPE(None, *(_TYPES[letter] for letter in letters))
            setattr(self, name, kind(self.address(name)))

    def address(self, name: str) -> int:
        """Return the address of the machine code of a task or an entry."""
        address = int(self._engine.get_function_address(name))
        if not address:
            raise KeyError(f"the kernels' machine code: expected a function {name!r}, found none")
        return address


@cache
def load() -> Library:
    """Load the kernels, once per process; compile them first if `code_file()` does not exist."""
    file = code_file()
    code = _read(file)
    if code is None:
        from kernels.cpu import machine_code

        code = machine_code.build()
        _write(file, code)
    return Library(code)


def _read(file: Path) -> bytes | None:
    """Return the code; None if there is no file or it is damaged."""
    try:
        return opened(file.read_bytes())
    except OSError:
        return None


def _write(file: Path, code: bytes) -> None:
    """Write the code atomically, because other processes may do the same now. A full disk is ignored."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            part.write_bytes(sealed(code))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
