"""Mutants of whole .metal kernels: how a file is read, and what is bound to its parameters."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "functions are kept once per address space",
        "kernels/emulator/metal_text.py",
        "without_twins",
        "key in seen",
        "False",
    ),
    Mutant(
        "`const` buffers can be written",
        "kernels/emulator/metal_text.py",
        "parameters",
        "not fixed",
        "True",
    ),
    Mutant(
        "an array that is given twice is two buffers",
        "kernels/emulator/metal_library.py",
        "WholeKernel._place",
        "other.is_same(value)",
        "False",
    ),
    Mutant(
        "function constants have no values",
        "kernels/emulator/metal_text.py",
        "MetalText.with_constants",
        "one.index not in values",
        "True",
    ),
    Mutant(
        "casts to vectors keep the bits",
        "kernels/emulator/metal_text.py",
        "Rewriter.rewritten",
        "self._call.sub(lambda match: f\"metal::msl_construct<{match['type']}>(\", body)",
        "body",
    ),
    Mutant(
        "a buffer without an index gets the next one",
        "kernels/emulator/metal_text.py",
        "parameters",
        "next(i for i in range(99) if i not in taken[role])",
        "len(taken[role])",
    ),
]
