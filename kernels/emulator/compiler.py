"""Find clang, compile kernels with it, and cache the compiled libraries.

Kernels are linked without libraries, so that no C++ library has to be built or found. Kernels call only functions that
the process has already loaded: those of the emulator's runtime, and exact functions of the C library, such as `fmodf`.

Kernels are compiled for a fixed instruction set per architecture, not for the current processor, so results, reported
bugs and their line numbers are equal on all processors of an architecture. Three rules make results bit-identical on
different architectures, too: multiplications and additions are not contracted to fma, functions such as `exp` are the
runtime's own (`runtime/math.c`), and half precision is rounded after every operation. The exception is the sign of a
NaN that an operation produces: negative on x86-64, positive on arm64.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..files import cache_folder, draft
from .errors import CompileError, CompilerMissingError

# ---- builds: their checks and optimisation ----


class Build(NamedTuple):
    """A way to compile kernels: clang flags that add certain checks."""

    name: str
    flags: tuple[str, ...]


# Alignment is checked in every build: a CPU can access a misaligned address, but a GPU may access another address
# instead.
_ALIGNMENT = ("-fno-sanitize=all", "-fsanitize=alignment", "-fno-sanitize-recover=all")
# The checks of undefined behaviour, besides alignment. Bugs that _CHECKS find are reported as mistakes, and bugs that
# _NOTES find, only as notes.
_CHECKS = "bounds,float-cast-overflow,integer-divide-by-zero,null,shift,signed-integer-overflow"
_NOTES = "implicit-integer-truncation"

# Every build checks the address spaces of kernels made by `metal_kernel`, because the types in `include/` contain them.
SPACES = Build("spaces", _ALIGNMENT)
UNDEFINED = Build("undefined", (*_ALIGNMENT, f"-fsanitize={_CHECKS},{_NOTES}", f"-fsanitize-recover={_NOTES}"))
_INSTRUMENTED = (
    "-DMSL_RACES",
    *("-fno-vectorize", "-fno-slp-vectorize"),  # clang does not instrument masked accesses of vectorised code
    *_ALIGNMENT,
    *("-Xclang", "-fsanitize=thread"),  # with a plain flag, zig would link its own runtime of this check
    *(flag for what in ("func-entry-exit", "atomics") for flag in ("-mllvm", f"-tsan-instrument-{what}=0")),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
)
# -O1 compiles faster than -O2, and the kernels are not slower, because they spend most of their time in calls of the
# instrumentation. The flag is passed by -Xclang, because zig treats a plain -O1 as -O2.
RACES = Build("races", (*_INSTRUMENTED, "-Xclang", "-O1"))
BUILDS = {build.name: build for build in (SPACES, UNDEFINED, RACES)}
# The optimiser moves and merges loads. Without it, a fault is reported at the line of a thread's first wrong access.
UNOPTIMIZED = Build("unoptimized", (*_ALIGNMENT, "-O0"))
# Maps the name of each build to a build with the same checks, but without optimisation. Kernels compile in a tenth of
# the time and run several times slower.
QUICK = {
    "spaces": UNOPTIMIZED,
    "undefined": Build("quick-undefined", (*UNDEFINED.flags, "-O0")),
    "races": Build("quick-races", (*_INSTRUMENTED, "-O0")),
}


# The environment variable that chooses another clang. Its value is a command or a path, and may have options.
VARIABLE = "MLX_ENGINE_CLANG"
# The environment variable that chooses another instruction set, to test that results do not depend on this choice. Its
# value is x86-64-v2, native, or another value of clang's -march. The processor must have the instructions.
INSTRUCTIONS = "MLX_ENGINE_MARCH"
_OLDEST = 17
_HERE = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")


class Compiler(NamedTuple):
    """The command of clang, and the version it reports."""

    command: tuple[str, ...]
    version: str


_KERNEL_FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    # The -mllvm options switch off passes that move a load into the branch that uses its value. So a load out of bounds
    # is found even if the branch is not taken.
    *("-O2", "-mllvm", "-instcombine-code-sinking=false", "-mllvm", "-disable-machine-sink"),
    "-fPIC",
    "-fvisibility=hidden",
    "-nostdinc",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks",  # an access through a null pointer must fault, and not be optimised away
    "-flax-vector-conversions=none",  # Metal has no implicit conversion of vectors
    "-fno-stack-protector",
    "-fstack-clash-protection",  # a private array that is too large for the stack faults in the page below the stack
    "-fno-threadsafe-statics",
    "-ftrivial-auto-var-init=pattern",  # NaN in uninitialised variables
    "-fsigned-char",
    # A half is rounded after each operation, as on a GPU.
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    # Line numbers for reports of faults, in DWARF 4, which is simpler to read than DWARF 5.
    *("-gline-tables-only", "-gdwarf-4"),
    *(
        "-Wall",
        "-Wno-unknown-attributes",
        "-Wno-unused",
        "-Wno-duplicate-decl-specifier",
        "-Wno-user-defined-literals",
        "-Wno-reserved-user-defined-literal",
    ),
    *("-Werror=return-type", "-Werror=uninitialized", "-Wdouble-promotion", "-Wimplicit-float-conversion"),
    f"-I{_HERE / 'include'}",
)
_RUNTIME_FLAGS = (
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-sanitize=all",
    "-fno-stack-protector",
    "-Wall",
    "-Wextra",
)
# Maps each architecture to the flags of its instruction set. "haswell" is x86-64-v3, which clang and zig spell
# differently. Without the half-precision conversions of x86-64-v3, kernels take twice as long. AVX-512 makes kernels no
# faster, and changes the lines at which faults are reported. On arm64, atomics must not be calls of library functions,
# because kernels are linked without libraries.
BASELINES = {
    "x86_64": ("-march=haswell",),
    "aarch64": ("-mcpu=generic", "-mno-outline-atomics"),
}
# The extensions of x86-64-v3 that some processors lack, by their names in /proc/cpuinfo.
_NEEDED_ON_X86 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm")
_LINK_FLAGS = ("-shared", "-nostdlib", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))


# ---- the compiler ----


def unavailable() -> str | None:
    """Return why kernels cannot be compiled here, or None if they can."""
    try:
        compiler()
    except CompilerMissingError as error:
        return str(error)
    return None


def compiler() -> Compiler:
    """Return the clang to use.

    Raises:
        CompilerMissingError: there is no clang, the clang that `VARIABLE` names is unusable, or the processor lacks
            instructions of x86-64-v3.
    """
    if missing := _lacking():
        raise CompilerMissingError(
            f"the kernel emulator compiles for x86-64-v3 (Intel since 2013, AMD since 2015): expected a processor with "
            f"{', '.join(_NEEDED_ON_X86)}, found one without {', '.join(missing)} in {_CPUINFO}; use another machine"
        )
    return _compiler(os.environ.get(VARIABLE), os.environ.get("PATH"))


@cache
def _compiler(chosen: str | None, path: str | None) -> Compiler:
    if chosen:
        found = _clang(tuple(chosen.split()))
        if isinstance(found, str):
            raise CompilerMissingError(f"{VARIABLE}={chosen}: {found}; expected clang {_OLDEST} or newer")
        return found
    package = importlib.util.find_spec("ziglang")
    if package and package.origin:  # every version of ziglang has a new enough clang
        version = importlib.metadata.version("ziglang")
        return Compiler((str(Path(package.origin).parent / "zig"), "cc"), f"ziglang {version}")
    for name in ("clang", *(f"clang-{version}" for version in range(30, _OLDEST - 1, -1))):
        if place := shutil.which(name, path=path):
            found = _clang((place,))
            if isinstance(found, Compiler):
                return found
    raise CompilerMissingError(
        f"the kernel emulator needs a compiler: expected the package ziglang, or clang {_OLDEST} or newer, "
        f"found neither; `pip install ziglang`, or set {VARIABLE}"
    )


def _clang(command: tuple[str, ...]) -> Compiler | str:
    """Return the compiler, or a description of why the command is unusable."""
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be run ({error})"
    version = re.search(r"clang version (\d+)", result.stdout)
    if result.returncode or not version:
        return "is not clang"
    if int(version[1]) < _OLDEST:
        return f"is clang {version[1]}"
    return Compiler(command, result.stdout.split("\n", 1)[0])


# ---- compiling ----


@cache
def _surroundings(*, runtime: bool) -> bytes:
    """Return a digest of the architecture and of files: the runtime's source if `runtime`, else the headers."""
    digest = hashlib.sha256()
    kernels = [*(_HERE / "include").rglob("*"), _HERE / "runtime" / "abi.h"]
    for file in sorted((_HERE / "runtime").glob("*.[ch]") if runtime else kernels):
        if file.is_file():
            digest.update(file.read_bytes())
    digest.update(_architecture().encode())
    return digest.digest()


def _architecture() -> str:
    """Return the processor's architecture by the name that Linux uses, also on other systems."""
    machine = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _baseline() -> tuple[str, ...]:
    """Return clang's flags for the instruction set; no flags, for clang's default, if the architecture is unknown."""
    if chosen := os.environ.get(INSTRUCTIONS):
        is_zig = compiler().command[0].endswith("zig")  # zig writes x86_64_v3 where clang writes x86-64-v3
        return (f"-march={chosen.replace('-', '_') if is_zig else chosen}",)
    return BASELINES.get(_architecture(), ())


@cache
def _lacking() -> list[str]:
    """Return the names in `_NEEDED_ON_X86` that /proc/cpuinfo lacks; none on arm64, or if `INSTRUCTIONS` is set."""
    if _architecture() != "x86_64" or os.environ.get(INSTRUCTIONS):
        return []
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("flags"):
                return [name for name in _NEEDED_ON_X86 if name not in line.split()]
    return []


def runtime_library() -> Path:
    """Return the path of the compiled runtime; compile the runtime if it is not cached."""
    sources = sorted((_HERE / "runtime").glob("*.c"))
    flags = (*_RUNTIME_FLAGS, *_baseline())
    name = f"runtime-{_digest(b'', flags)}.so"

    def compile_in(folder: Path) -> None:
        def compile_one(source: Path) -> Path:
            # Linking is a separate command: it needs -nostdlib, with which zig finds no headers of the C library.
            item = folder / f"{source.stem}.o"
            _run([*compiler().command, *flags, "-c", str(source), "-o", str(item)], folder)
            return item

        with ThreadPoolExecutor() as pool:
            items = list(pool.map(compile_one, sources))
        _link(items, folder / name)

    return _built(name, compile_in)


# Text with tensors is compiled as C++23: `matmul2d` takes structures as template arguments, and `tensor[i, j]` has
# several indices. For such text the SLP vectoriser is off, because clang 22's fails on loads of bools, such as masks.
_TENSORS = re.compile(r"\b(?:tensor_ops|tensor_inline|tensor_handle|cooperative_tensor|d?extents\s*<)")


def uses_tensors(text: str) -> bool:
    """Return whether a kernel's text uses Metal's tensors."""
    return _TENSORS.search(text) is not None


def _language(text: str) -> tuple[str, ...]:
    return ("-std=c++2b", "-fno-slp-vectorize") if uses_tensors(text) else ()


def kernel_library(text: str, build: Build, accept: Callable[[], None] | None = None) -> Path:
    """Return the path of the compiled library of a translation unit; compile the unit if it is not cached.

    `accept` is called after a compilation; if `accept` raises an error, the library is not cached.

    Raises:
        CompileError: clang reports errors; the message has them.
    """
    flags = (*_KERNEL_FLAGS, *_language(text), *_baseline(), *build.flags)
    name = f"{build.name}-{_digest(text.encode(), flags)}.so"

    def compile_in(folder: Path) -> None:
        item = _compiled(text, flags, folder)
        if accept is not None:
            accept()
        _link([item], folder / name)

    return _built(name, compile_in)


# Further flags for a complete .metal file. As in Metal, literals without a suffix are floats, also in included files
# (-cl-single-precision-constant). In templates, clang still treats such literals as doubles, so the warning about
# promotion to double is off.
_FILE_FLAGS = ("-Dkernel=", "-Xclang", "-cl-single-precision-constant", "-Wno-double-promotion", "-O0")


def check_syntax(text: str, folders: Sequence[Path]) -> None:
    """Compile a complete .metal file to find errors. Nothing is cached, because files that it includes may change.

    Raises:
        CompileError: clang reports errors.
    """
    included = (f"-I{folder.resolve()}" for folder in folders)
    flags = (*_KERNEL_FLAGS, *_language(text), *SPACES.flags, *_baseline(), *_FILE_FLAGS, *included)
    with draft(cache_folder("emulator") / "checking", is_folder=True) as scratch:
        _compiled(text, flags, scratch)


def _compiled(text: str, flags: Sequence[str], folder: Path) -> Path:
    """Compile a translation unit in a folder and return the path of the object file."""
    source, item = folder / "kernels.cc", folder / "kernels.o"
    source.write_text(text, encoding="utf-8")
    _run([*compiler().command, *flags, "-c", str(source), "-o", str(item)], folder, judge=_judge)
    return item


_LLVM_FLAGS = ("-g0", "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm")


def calls_of(text: str, build: Build) -> str:
    """Return a translation unit as unoptimised LLVM IR, in which no call is inlined."""
    flags = (*_KERNEL_FLAGS, *_language(text), *_baseline(), *build.flags, *_LLVM_FLAGS)
    with draft(cache_folder("emulator") / "checking", is_folder=True) as scratch:
        source, item = scratch / "kernels.cc", scratch / "kernels.ll"
        source.write_text(text, encoding="utf-8")
        _run([*compiler().command, *flags, str(source), "-o", str(item)], scratch)
        return item.read_text()


def preprocess(text: str, folders: Sequence[Path], standard: Path) -> str:
    """Return the text of a complete .metal file with includes and macros expanded, and with line markers.

    Included files are searched in `folders`, then in `standard`, a temporary folder with empty files in place of the
    headers of Metal. Source and result are written to `standard`, too.

    Raises:
        CompileError: an included file is missing, or a preprocessor directive is wrong.
    """
    known = {"__METAL__": 1, "__METAL_VERSION__": 400, "__METAL_MACOS__": 1, "__HAVE_BFLOAT__": 1, "__FAST_MATH__": 1}
    known["__HAVE_TENSOR__"] = 1
    source, item = standard / "kernels.cc", standard / "kernels.i"
    source.write_text(text, encoding="utf-8")
    command = [*compiler().command, "-E", "-x", "c++", "-std=c++17", "-nostdinc"]
    command += [f"-D{name}={value}" for name, value in known.items()]
    command += [f"-I{folder.resolve()}" for folder in (*folders, standard)]
    _run([*command, str(source), "-o", str(item)], standard)
    return item.read_text(encoding="utf-8")


def _link(items: Sequence[Path], file: Path) -> None:
    _run([*compiler().command, *_LINK_FLAGS, *map(str, items), "-o", str(file)], file.parent)


def _digest(text: bytes, flags: Sequence[str]) -> str:
    # The digest covers the headers' contents but not their path (-I), so that several checkouts share the cache. An
    # empty `text` stands for the runtime.
    used = [flag for flag in flags if not flag.startswith("-I")]
    known = repr((text, used, compiler().version, _surroundings(runtime=not text)))
    return hashlib.sha256(known.encode()).hexdigest()[:24]


def _built(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached file of this name; create it if it is missing. Several processes may create it at once."""
    file = cache_folder("emulator") / name
    if file.exists():
        return file
    with draft(file, is_folder=True) as scratch:
        make(scratch)
        (scratch / name).replace(file)
    return file


def _judge(output: str) -> None:
    """Raise CompileError if clang's output has warnings about code that is an error in Metal."""
    for line in output.splitlines():
        if "-Wimplicit-float-conversion" in line and "to 'bfloat" in line:
            raise CompileError(f"{line}\nMetal has no implicit conversion to bfloat; write `bfloat(...)` or `T(...)`")
        if "-Wdouble-promotion" in line and "to 'double'" in line:
            raise CompileError(f"{line}\nMetal has no double; use float")


_DIAGNOSTIC = re.compile(r"^[^\s:][^:\n]*:\d+:\d+: (?P<kind>fatal error|error|warning|note|remark): ")


def errors_only(output: str) -> str:
    """Return clang's errors with their notes, without warnings; the whole output if there is no error."""
    kept, keeps, errors = [], True, 0
    for line in output.strip().splitlines():
        found = _DIAGNOSTIC.match(line)
        if found and found["kind"] != "note":
            keeps = found["kind"].endswith("error")
            errors += keeps
        if keeps:
            kept.append(line)
    return "\n".join(kept) if errors else output.strip()


def _run(command: Sequence[str], scratch: Path, judge: Callable[[str], None] | None = None) -> None:
    caches = {
        "ZIG_GLOBAL_CACHE_DIR": str(cache_folder("emulator") / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig"),
    }
    environment = {**os.environ, **caches}
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=scratch)
    except OSError as error:
        raise CompilerMissingError(f"{command[0]} cannot be run ({error}); expected clang, see {VARIABLE}") from error
    if result.returncode:
        raise CompileError(errors_only(result.stderr) or f"{command[0]} ended with {result.returncode}")
    if judge:
        judge(result.stderr)
