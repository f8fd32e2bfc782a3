"""The ways to compile a kernel for the emulator: what each build checks, and how much it is optimised."""

from __future__ import annotations

from typing import NamedTuple


class Build(NamedTuple):
    """A way to compile kernels."""

    name: str
    flags: tuple[str, ...]


# Alignment is checked in every build: a processor reads what is misaligned, a GPU reads something else.
_ALIGNMENT = ("-fno-sanitize=all", "-fsanitize=alignment", "-fno-sanitize-recover=all")
_CHECKS = "bounds,float-cast-overflow,integer-divide-by-zero,null,shift,signed-integer-overflow"
_NOTES = "implicit-integer-truncation"

SPACES = Build("spaces", _ALIGNMENT)
UNDEFINED = Build("undefined", (*_ALIGNMENT, f"-fsanitize={_CHECKS},{_NOTES}", f"-fsanitize-recover={_NOTES}"))
_INSTRUMENTED = (
    "-DMSL_RACES",
    *("-fno-vectorize", "-fno-slp-vectorize"),  # vectorised accesses may be masked, and are not instrumented
    *_ALIGNMENT,
    *("-Xclang", "-fsanitize=thread"),  # past zig, which would link its own runtime
    *(flag for what in ("func-entry-exit", "atomics") for flag in ("-mllvm", f"-tsan-instrument-{what}=0")),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
)
# -O1 compiles faster, and runs as fast: most of the time is spent in the calls. Zig takes a plain -O1 for -O2.
RACES = Build("races", (*_INSTRUMENTED, "-Xclang", "-O1"))
BUILDS = {build.name: build for build in (SPACES, UNDEFINED, RACES)}
# The optimiser moves loads and merges their lines. Without optimisation, the first access that faults is the first one
# in the kernel's text, on every processor.
UNOPTIMIZED = Build("unoptimized", (*_ALIGNMENT, "-O0"))
# The same checks without optimisation: compiled in a tenth of the time, and several times slower to run.
QUICK = {
    "spaces": UNOPTIMIZED,
    "undefined": Build("quick-undefined", (*UNDEFINED.flags, "-O0")),
    "races": Build("quick-races", (*_INSTRUMENTED, "-O0")),
}
