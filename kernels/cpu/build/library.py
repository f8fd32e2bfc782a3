"""The library of compiled kernels: machine code that is cached on disk and loaded without a compiler.

Only the first process that needs the kernels compiles them, with Numba. All others use LLVM's loader alone, which
starts faster and takes less memory. The kernels of a storage format are compiled when a model first has that format.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding

from ...drafts import draft
from ...folder import cache_folder

# The package `kernels.cpu`, by the name under which it was imported.
PACKAGE = __name__.removesuffix(".build.library")
# The modules of the kernels that every model needs, in parts that are compiled at the same time and take equally long:
# about 8 seconds of a core each (Zen 5, busy), two thirds of them in Numba, before LLVM optimises.
BASE = {
    "products": (
        "attention.heads",
        "build.jobs",
        "products.activations",
        "products.experts",
        "products.gemm",
        "products.gemv",
        "products.linear",
        "products.norms",
        "products.sum_exp",
    ),
    "steps": (
        "attention.attention",
        "program",
        "states.convolution",
        "states.delta_rule",
    ),
}
# What products in fixed point need besides, and what a format's name ends with in the part that has its panels.
FIXED, FIXED_END = "fixed", ".fixed"
MODULES = {**BASE, FIXED: ("products.fixed", "products.fixed_gemv")}
# The storage formats; each is compiled alone. The module of a format has its name. MLX's affine formats have names such
# as "affine4_g64_bf16" and the module `affine`, see `affine_format`.
FORMATS = (
    "float32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
    "mxfp4",
)  # fmt: skip
# The functions that Python calls, and the types of their arguments: i is an integer or an address, f a float64.
ENTRIES = {
    "work_until_idle": "iii",
    "project": "iiiiiii",
    "norm_rope_pair": "iiiiiiiiiiii",
    "put_pair": "iiiiiiiiiiiii",
    "run_experts": "iiiiiii",
    "norm_add": "iiiiiii",
    "attend": "iiiiiiiiiiiiiiiiffiii",
    "run_steps": "iiiiiiiii",
    "embed": "iiiiii",
    "sum_exp": "iifi",
    "soft_cap": "iifi",
    "short_conv": "iiiiiiiiiiiii",
    "sigmoid_gate": "iiiiiiiii",
    "delta_net": "iiiiiiiiiiiii",
}
_AFFINE = re.compile(r"affine([234568])_g(32|64|128)_(f16|bf16|f32)")
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


def affine_format(name: str) -> tuple[int, int, str] | None:
    """Return the bits, the group size and the type of scales of one of MLX's affine formats; None for other names."""
    found = _AFFINE.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), found[3])


def is_format(name: str) -> bool:
    """Return whether there are kernels for a storage format."""
    return name in FORMATS or affine_format(name) is not None


# ---- where compiled code is kept ----


def _digest() -> str:
    """Return a digest of the kernels' source. Numba's own cache would miss a change in a function that a kernel calls.

    The source may be in an archive, or exist as bytecode alone.
    """
    packages = (
        PACKAGE,
        *(f"{PACKAGE}.{package}" for package in ("attention", "build", "formats", "products", "states")),
    )
    files = [(package, file.name, file) for package in packages for file in resources.files(package).iterdir()]
    sources = sorted(each for each in files if each[1].endswith((".py", ".pyc")))
    return hashlib.sha256(b"".join(file.read_bytes() for _, _, file in sources)).hexdigest()[:16]


@cache
def folder() -> Path:
    """Return the folder for compiled code of this version of the source; it does not change within a process."""
    return cache_folder("kernels", given=os.environ.get("NUMBA_CACHE_DIR")) / _digest()


def code_file(part: str) -> Path:
    """Return the path of a part's machine code for this processor, this LLVM and Numba's variables.

    A part is a key of `MODULES`, a format, or a format with `FIXED_END`. The file may not exist yet.
    """
    processor = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    told = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR")
    compiler = binding.get_process_triple(), binding.get_host_cpu_features().flatten(), binding.llvm_version_info, told
    target = hashlib.sha256(repr(compiler).encode()).hexdigest()[:16]
    return folder() / f"{processor}-{target}-{part}.code"


# ---- loading ----

# Bytes of the checksum before the code.
_CHECK = hashlib.sha256().digest_size


def sealed(code: bytes) -> bytes:
    """Return the code with a checksum before it."""
    return hashlib.sha256(code).digest() + code


def opened(content: bytes) -> bytes | None:
    """Return sealed code without its checksum, or None if it is damaged: LLVM would abort the process."""
    code = content[_CHECK:]
    return code if hashlib.sha256(code).digest() == content[:_CHECK] else None


class Code:
    """Loaded object files."""

    def __init__(self, objects: Iterable[bytes]) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
        # The engine owns the code's memory.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        for file in objects:
            self._engine.add_object_file(binding.ObjectFileRef.from_data(file))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return the address of the machine code of an exported function."""
        address = int(self._engine.get_function_address(name))
        if not address:
            raise KeyError(f"the kernels' machine code: expected a function {name!r}, found none")
        return address

    def function(self, name: str, letters: str) -> Callable[..., None]:
        """Return an exported function that returns nothing and runs without the interpreter's lock."""
        kind: Any = ctypes.CFUNCTYPE(None, *(_TYPES[letter] for letter in letters))
        found: Callable[..., None] = kind(self.address(name))
        return found


class Format(NamedTuple):
    """The kernels of a storage format, in the order of a format's words (`layout.py`).

    Attributes:
        four_rows: address of the kernel that multiplies stored rows.
        expand: address of the kernel that expands blocks to float32.
        block: weights of a block.
        block_bytes: bytes of a block.
        most_stored: the most vectors that are multiplied with rows as they are stored.
    """

    four_rows: int
    expand: int
    block: int
    block_bytes: int
    most_stored: int


class Panels(NamedTuple):
    """The panels of a storage format, in the order of a matrix's words (`layout.py`).

    Attributes:
        expand: address of the kernel that expands rows.
        kind: the kind of the format.
        eight_rows: address of the kernel that multiplies rows as they are stored.
    """

    expand: int
    kind: int
    eight_rows: int


class Library(Code):
    """The loaded kernels: entries as functions, tasks as addresses, formats on demand.

    Attributes: one function per name in `ENTRIES`.
    """

    work_until_idle: Callable[..., None]
    project: Callable[..., None]
    norm_rope_pair: Callable[..., None]
    put_pair: Callable[..., None]
    run_experts: Callable[..., None]
    norm_add: Callable[..., None]
    attend: Callable[..., None]
    run_steps: Callable[..., None]
    embed: Callable[..., None]
    sum_exp: Callable[..., None]
    soft_cap: Callable[..., None]
    short_conv: Callable[..., None]
    sigmoid_gate: Callable[..., None]
    delta_net: Callable[..., None]

    def __init__(self, objects: Iterable[bytes]) -> None:
        super().__init__(objects)
        self._formats: dict[str, tuple[Code, Format]] = {}
        self._panels: dict[str, tuple[Code, Panels]] = {}
        self._fixed: Code | None = None
        for name, letters in ENTRIES.items():
            setattr(self, name, self.function(name, letters))

    def has_format(self, name: str) -> bool:
        """Return whether a format's kernels are loaded."""
        return name in self._formats

    def format(self, name: str, *others: str) -> Format:
        """Return a format's kernels; `name` is the module of `kernels.cpu` that defines it.

        What has not been compiled yet is compiled now: this format and `others` at the same time.
        """
        if name not in self._formats:
            wanted = [one for one in dict.fromkeys((name, *others)) if one not in self._formats]
            for one, code in codes(wanted).items():
                loaded, sizes = Code([code]), (ctypes.c_int64 * 3)()
                loaded.function(f"{one}_sizes", "i")(ctypes.addressof(sizes))
                kernels = (loaded.address(f"{one}_{kernel}") for kernel in ("four_rows", "expand"))
                # Another thread may have loaded it in the meantime, and its kernels may be running.
                self._formats.setdefault(one, (loaded, Format(*kernels, *sizes)))
        return self._formats[name][1]

    def has_panels(self, name: str) -> bool:
        """Return whether a format's panels, and all that products in fixed point need, are loaded."""
        return name in self._panels and self._fixed is not None

    def panels(self, name: str, *others: str) -> Panels:
        """Return a quantised format's panels; compile what is missing, as `format` does."""
        if not self.has_panels(name):
            missing = [one for one in dict.fromkeys((name, *others)) if one not in self._panels]
            found = codes([*(one + FIXED_END for one in missing), *([FIXED] if self._fixed is None else [])])
            if FIXED in found:
                self._fixed = self._fixed or Code([found[FIXED]])
            for one in missing:
                loaded, kind = Code([found[one + FIXED_END]]), ctypes.c_int64()
                loaded.function(f"{one}_panel_kind", "i")(ctypes.addressof(kind))
                found_panels = Panels(loaded.address(f"{one}_panel"), kind.value, loaded.address(f"{one}_eight_rows"))
                self._panels.setdefault(one, (loaded, found_panels))
        return self._panels[name][1]

    def fixed_task(self, name: str) -> int:
        """Return the address of a task of products in fixed point; `panels` has loaded it."""
        if self._fixed is None:
            raise KeyError(f"the kernels' machine code: expected {name!r} after the panels of a format, found none")
        return self._fixed.address(name)


@cache
def load() -> Library:
    """Load the kernels that every model needs, once per process; compile them first if they are not cached."""
    return Library(codes(BASE).values())


def codes(parts: Iterable[str]) -> dict[str, bytes]:
    """Return the machine code of these parts, by part, from the cache; compile what is not there, all at once."""
    found = {part: _read(code_file(part)) for part in parts}
    missing = [part for part, code in found.items() if code is None]
    if missing:
        from .machine_code import locked

        with locked(map(code_file, missing)):
            found |= _made(missing)
    return {part: code for part, code in found.items() if code is not None}


def _made(parts: list[str]) -> dict[str, bytes]:
    """Compile parts and keep their code, but for those that another process has compiled since."""
    found = {part: code for part in parts if (code := _read(code_file(part))) is not None}
    missing = [part for part in parts if part not in found]
    if missing:
        from . import machine_code

        for part, code in machine_code.build(missing).items():
            _write(code_file(part), code)
            found[part] = code
    return found


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
        with draft(file) as part:
            part.write_bytes(sealed(code))
            part.replace(file)
