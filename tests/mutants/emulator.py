"""Mutants of the emulator and the lab: what is checked, and what is let through."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "literals without a suffix stay doubles in templates",
        "kernels/emulator/text.py",
        "with_suffixes",
        "[text[last : literal.end()], 'f']",
        "[text[last : literal.end()]]",
    ),
    Mutant(
        "warnings bury an error",
        "kernels/emulator/compiler.py",
        "errors_only",
        "found['kind'].endswith('error')",
        "True",
    ),
    Mutant(
        "bytes past an input pass for bytes past an output",
        "kernels/emulator/memory.py",
        "Buffer.mark_as_input",
        "ctypes.memmove(start, _BESIDE_INPUTS, length)",
        "ctypes.memset(start, CANARY, length)",
    ),
    Mutant(
        "only the first order of threads counts",
        "kernels/emulator/intercept.py",
        "CheckedKernel._results",
        "self._compare(results[0], results[-1], given)",
        "self._compare(results[0], results[0], given)",
    ),
    Mutant(
        "what a shuffle read is not told",
        "kernels/lab/check.py",
        "_examine",
        "Failure(case.label, seed, build, text + undefined)",
        "Failure(case.label, seed, build, text)",
    ),
    Mutant(
        "gradients of kernels are zero",
        "kernels/emulator/intercept.py",
        "CheckedKernel.__call__",
        "_tied(self.name, inputs, results)",
        "results",
    ),
    Mutant(
        "compiled functions call kernels with nothing",
        "kernels/emulator/intercept.py",
        "_uncompiled",
        "mx.disable_compile()",
        "pass",
    ),
    Mutant(
        "a pretended GPU is taken for one",
        "kernels/launch.py",
        "unavailable",
        "mx.metal.is_available.__name__ != 'pretended' and mx.metal.is_available()",
        "mx.metal.is_available()",
    ),
    Mutant(
        "our kernels are not held to CUDA's rules",
        "kernels/lab/catalog.py",
        "Entry.check",
        "replace(orders, lanes='all', suffixes=True)",
        "orders",
    ),
    Mutant(
        "unknown inputs in data are dropped",
        "kernels/lab/validate.py",
        "check_data",
        "[str(name) for name in values if name not in names]",
        "[]",
    ),
    Mutant(
        "a file that checks nothing has passed",
        "kernels/lab/check_file.py",
        "FileReport.passed",
        "bool(self.calls or self.verdicts or self.compiled)",
        "True",
    ),
]
