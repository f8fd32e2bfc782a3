"""Load the machine code of the kernels: code that came with the package, or code that is compiled on this machine.

Code that came with the package (`prebuilt.py`) needs neither Numba nor LLVM. Without such code, the first process that
needs the kernels compiles them with Numba, and keeps the code on disk. Later processes load the code with LLVM alone,
which starts faster than Numba and takes less memory. The kernels are divided into *parts*, each compiled by itself.
Parts that only some models need are compiled when such a model is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ...files import cache_folder, draft
from .prebuilt import SharedCode, find

# The package `kernels.cpu`, by the name under which it was imported.
PACKAGE = __name__.removesuffix(".build.library")
# Maps the parts that every model needs to their modules. There are two parts, so that two processes can compile at the
# same time.
BASE = {
    "products": (
        "build.jobs",
        "products.activations",
        "products.gemm",
        "products.gemv",
        "products.linear",
        "products.norms",
        "products.sum_exp",
    ),
    "attention": ("attention.attention", "attention.heads", "program"),
}
# FIXED is the part that all products in fixed point need. The fixed-point kernels of each format are a separate part,
# whose name is the format's name followed by FIXED_END.
FIXED, FIXED_END = "fixed", ".fixed"
# Maps all parts except those of formats to their modules.
MODULES = {
    **BASE,
    "experts": ("products.experts",),
    "states": ("states.convolution", "states.delta_rule", "states.state_space"),
    FIXED: ("products.fixed", "products.fixed_gemv"),
    "roofline": ("roofline",),
}
# Maps exported functions to their parts, for the parts that are not in `BASE` and belong to no format.
_HOMES = {
    name: part
    for part, names in {
        "experts": "run_experts mark_expert",
        "states": "short_conv convolve_span gate_rows gate_span delta_net delta_head state_space space_head space_norm",
        FIXED: "multiply_fixed prepare_fixed multiply_fixed_stored prepare_records",
        "roofline": "read_words read_words_in_order run_rounds",
    }.items()
    for name in names.split()
}
# The storage formats. Each is a part, and its module in kernels/cpu/formats has the same name. MLX's affine formats,
# such as "affine4_g64_bf16", are not listed: their module is `affine`.
FORMATS = (
    "float32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
    "mxfp4",
)  # fmt: skip
HOW_TO_COMPILE = "Numba, which compiles the kernels, is not installed: pip install numba"
# Maps the functions that Python calls to the types of their arguments: i is an integer or an address, f a float64.
ENTRIES = {
    "work_until_idle": "iii",
    "project": "iiiiiii",
    "norm_rope_pair": "iiiiiiiiiiii",
    "put_pair": "iiiiiiiiiiiii",
    "run_experts": "iiiiiii",
    "mark_expert": "iiii",
    "norm_add": "iiiiiii",
    "attend": "iiiiiiiiiiiiiiiiiffiii",
    "run_steps": "iiiiiiiii",
    "embed": "iiiiii",
    "sum_exp": "iifi",
    "soft_cap": "iifi",
    "short_conv": "iiiiiiiiiiiii",
    "gate_rows": "iiiiiiiiii",
    "delta_net": "iiiiiiiiiiiii",
    "state_space": "iiiiiiiiiiii",
    "read_words": "iii",
    "read_words_in_order": "iii",
    "run_rounds": "ii",
}
_AFFINE = re.compile(r"affine([234568])_g(32|64|128)_(f16|bf16|f32)")
_TYPES: dict[str, Any] = {"i": ctypes.c_int64, "f": ctypes.c_double}

# f16c converts float16 scales; x86 processors have had it since 2012. Without f16c, LLVM would emit a call of a library
# function (`_CALLED`) that the process may not have.
_NEEDED_ON_X86 = ("f16c", "fma", "avx2")
# LLVM's name of the processor feature with which AMX multiplies *tiles*, small matrices of int8.
TILES = "+amx-int8"
_WIDEN = "define float @widen(half %x) {\n  %y = fpext half %x to float\n  ret float %y\n}"
_CALLED = (b"__extendhfsf2", b"__gnu_h2f_ieee")


def lacking() -> str | None:
    """Return why the kernels cannot be loaded or compiled for the processor; None if nothing is known to prevent it.

    The processor is this one, or the one named by NUMBA_CPU_NAME.
    """
    if isinstance(found := _prebuilt(), SharedCode):
        return None
    if importlib.util.find_spec("llvmlite") is None:
        return f"{found}, and {HOW_TO_COMPILE}"
    from llvmlite import binding

    chosen, given = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if not binding.get_process_triple().startswith(("x86_64", "i686")):
        return None
    if chosen or given is not None:
        # NUMBA_CPU_NAME without NUMBA_CPU_FEATURES implies the features of the named processor (`features`).
        own = "" if chosen else binding.get_host_cpu_features().flatten()
        name = chosen or binding.get_host_cpu_name()
        is_able = _widens(name, own if given is None else given)
        return None if is_able else f"the processor that Numba is told to compile for ({name}) lacks f16c"
    features = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED_ON_X86 if not features.get(name)]
    return f"the processor ({binding.get_host_cpu_name()}) lacks {', '.join(missing)}" if missing else None


def features() -> str:
    """Return the features of the processor to compile for, as LLVM names them.

    If NUMBA_CPU_FEATURES is set, return its value. Otherwise, if NUMBA_CPU_NAME is set, return "", because the name
    implies the features. Otherwise return the features of this processor. If the system does not permit AMX, disable
    AMX in the returned features.
    """
    from llvmlite import binding

    own = "" if os.environ.get("NUMBA_CPU_NAME") else binding.get_host_cpu_features().flatten()
    found = os.environ.get("NUMBA_CPU_FEATURES", own)
    return found if TILES not in found or permits_tiles() else found.replace(TILES, "-amx-int8")


@cache
def permits_tiles() -> bool:
    """Ask Linux to let this process use AMX; return whether it does.

    Without the permission, an instruction that loads a tile ends the process. Threads and forks inherit the permission;
    a program that this process starts has to ask again.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)
    call, request, tile_data = (ctypes.c_long(n) for n in (158, 0x1023, 18))
    return int(ctypes.CDLL(None).syscall(call, request, tile_data)) == 0


def _widens(processor: str, features: str) -> bool:
    """Return whether LLVM converts a float16 to float32 with an instruction of the named processor."""
    from llvmlite import binding

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
    """Return a digest of the kernels' source, so that code compiled from other source is never used.

    Numba's own cache does not notice a change in a function that a kernel calls. The source may be in an archive, or
    exist only as bytecode (.pyc).
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
    """Return the folder for code compiled from this version of the source; always the same folder within a process."""
    return cache_folder("kernels", given=os.environ.get("NUMBA_CACHE_DIR")) / _digest()


def code_file(part: str) -> Path:
    """Return the path of a part's code, which depends on the processor, on LLVM and on the NUMBA_... variables."""
    from llvmlite import binding

    processor = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    given = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR")
    compiler = binding.get_process_triple(), features(), binding.llvm_version_info, given
    target = hashlib.sha256(repr(compiler).encode()).hexdigest()[:16]
    return folder() / f"{processor}-{target}-{part}.code"


# ---- loading ----

# Bytes of the checksum before the code.
_CHECK = hashlib.sha256().digest_size


def sealed(code: bytes) -> bytes:
    """Return the code with a checksum before it."""
    return hashlib.sha256(code).digest() + code


def opened(content: bytes) -> bytes | None:
    """Return sealed code without its checksum; None if it is damaged (loading it would abort the process)."""
    code = content[_CHECK:]
    return code if hashlib.sha256(code).digest() == content[:_CHECK] else None


class Code:
    """A loaded object file."""

    def __init__(self, content: bytes) -> None:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
        # LLVM's execution engine owns the code's memory, so this object must outlive the use of the code.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._engine.add_object_file(binding.ObjectFileRef.from_data(content))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Return the address of the machine code of an exported function; 0 if no function has this name."""
        return int(self._engine.get_function_address(name))


def function(address: int, letters: str) -> Callable[..., None]:
    """Return a Python callable for the void function at an address. Calls run without the GIL."""
    kind: Any = ctypes.CFUNCTYPE(None, *(_TYPES[letter] for letter in letters))
    found: Callable[..., None] = kind(address)
    return found


class Format(NamedTuple):
    """The kernels and sizes of a storage format: fields FOUR_ROWS to MOST_STORED of a descriptor (`layout.py`)."""

    four_rows: int
    expand: int
    block: int
    block_bytes: int
    most_stored: int


class Panels(NamedTuple):
    """The fixed-point kernels of a storage format: fields PANEL to EIGHT_ROWS of a descriptor (`layout.py`)."""

    expand: int
    kind: int
    most: int
    eight_rows: int


class Library:
    """The loaded kernels, with a method for each name in `ENTRIES`. Parts are loaded when they are first needed."""

    def __init__(self) -> None:
        self._parts: dict[str, Code | SharedCode] = {}
        self._formats: dict[str, Format] = {}
        self._panels: dict[str, Panels] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ENTRIES:
            raise AttributeError(f"the kernels have no entry {name!r}")
        entry = function(self.address(name), ENTRIES[name])
        setattr(self, name, entry)
        return entry

    def has(self, parts: Iterable[str]) -> bool:
        """Return whether these parts are loaded."""
        return all(part in self._parts for part in parts)

    def need(self, parts: Iterable[str]) -> None:
        """Load these parts. Parts that have not been compiled yet are compiled in parallel.

        Raises:
            ImportError: a part has to be compiled, and Numba is not installed.
            LookupError: the process uses the machine code that came with the package, and this code lacks a part.
            RuntimeError: the parts cannot be compiled.
        """
        missing = [part for part in dict.fromkeys(parts) if part not in self._parts]
        if missing and isinstance(found := _prebuilt(), SharedCode):
            # Parts that the prebuilt code lacks are not compiled. New code would be for this processor, and prebuilt
            # code may be for an older one. The two may use different memory layouts, so they cannot be mixed.
            absent = [part for part in missing if part not in found.parts]
            if absent:
                raise LookupError(f"the machine code that came with this package has no {', '.join(absent)}")
            self._parts |= dict.fromkeys(missing, found)
            return
        for part, code in codes(missing).items():
            # If another thread has loaded the part meanwhile, keep that thread's code: its kernels may be running.
            self._parts.setdefault(part, Code(code))

    def address(self, name: str) -> int:
        """Return the address of an exported function's machine code; raise KeyError if no function has this name."""
        homes = [_HOMES[name]] if name in _HOMES else list(BASE)
        self.need(homes)
        found = next(filter(None, (self._parts[part].address(name) for part in homes)), 0)
        if not found:
            raise KeyError(f"the kernels' machine code: expected a function {name!r}, found none")
        return found

    def format(self, name: str) -> Format:
        """Return the kernels of a storage format, such as "q8_0"."""
        found = self._formats.get(name)
        if found is None:
            self.need([name])
            code, sizes = self._parts[name], (ctypes.c_int64 * 3)()
            function(code.address(f"{name}_sizes"), "i")(ctypes.addressof(sizes))
            kernels = (code.address(f"{name}_{kernel}") for kernel in ("four_rows", "expand"))
            found = self._formats[name] = Format(*kernels, *sizes)
        return found

    def panels(self, name: str) -> Panels:
        """Return the kernels of a quantised format for products in fixed point."""
        found = self._panels.get(name)
        if found is None:
            part, facts = name + FIXED_END, (ctypes.c_int64 * 2)()
            self.need([part, FIXED])
            code = self._parts[part]
            function(code.address(f"{name}_panel_kind"), "i")(ctypes.addressof(facts))
            kernels = code.address(f"{name}_panel"), *facts, code.address(f"{name}_eight_rows")
            found = self._panels[name] = Panels(*kernels)
        return found


_library = cache(Library)


@cache
def _prebuilt() -> SharedCode | str:
    """Return the machine code that came with the package, or why there is none for this processor."""
    return find(_digest())


def load(parts: Iterable[str] = ()) -> Library:
    """Load `parts` and the parts that every model needs; return this process's library. Compile parts if needed."""
    found = _library()
    found.need([*BASE, *parts])
    return found


# ---- compiling what is missing ----


@contextlib.contextmanager
def _silent(parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    yield lambda part: None


# A hook to report progress. It is called with the parts that will be compiled, and returns a context manager. The
# context yields a function, which is called with each part that has been compiled.
announce: Callable[[Sequence[str]], contextlib.AbstractContextManager[Callable[[str], None]]] = _silent


def codes(parts: Iterable[str]) -> dict[str, bytes]:
    """Return {part: machine code} from the folder of compiled code. Compile missing parts, in parallel.

    Raises ImportError and RuntimeError as `machine_code.build` does.
    """
    found = {part: _read(code_file(part)) for part in parts}
    missing = [part for part, code in found.items() if code is None]
    if missing:
        from .machine_code import locked

        with announce(missing) as done, locked(map(code_file, missing)):
            found |= _made(missing, done)
    return {part: code for part, code in found.items() if code is not None}


def _made(parts: list[str], done: Callable[[str], None]) -> dict[str, bytes]:
    """Return {part: code}: read parts that another process has compiled meanwhile; compile and store the others."""
    found = {part: code for part in parts if (code := _read(code_file(part))) is not None}
    for part in found:
        done(part)
    missing = [part for part in parts if part not in found]
    if missing:
        from . import machine_code

        def keep(part: str, code: bytes) -> None:
            _write(code_file(part), code)
            found[part] = code
            done(part)

        machine_code.build(missing, keep)
    return found


def _read(file: Path) -> bytes | None:
    """Return the code in a file; None if there is no file or the file is damaged."""
    try:
        return opened(file.read_bytes())
    except OSError:
        return None


def _write(file: Path, code: bytes) -> None:
    """Seal and write code, atomically: other processes may write the same file. Ignore errors such as a full disk."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with draft(file) as part:
            part.write_bytes(sealed(code))
            part.replace(file)
