"""Compile exported kernels to an object file, in a process that `machine_code.py` starts for this alone.

Numba optimises a function once alone and again inside every caller, and emits code and a wrapper each time. Only the
machine code of whole kernels is needed here. So the unoptimised LLVM IR of all functions is linked and optimised once,
as a whole.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from llvmlite import binding, ir
from numba.core import codegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from . import jit
from .library import FIXED_END, MODULES, PACKAGE, sealed


class _Untouched(codegen.CPUCodeLibrary):  # type: ignore[misc]
    """Functions as Numba translates them, not optimised."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_specific(self) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: no function is called in this process."""
        return 0


class _Translator(codegen.JITCPUCodegen):  # type: ignore[misc]
    """A code generator for this processor that loads no code."""

    _library_class = _Untouched

    def _add_module(self, module: Any) -> None:
        pass

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: environments are for code that calls Python."""


@global_compiler_lock
def compiled(part: str) -> bytes:
    """Return the object file of `part` (`library.code_file`). Numba is unusable afterwards."""
    jit.for_export()
    names = {f"{PACKAGE}.{name}" for name in MODULES.get(part, ())}
    for name in names:
        importlib.import_module(name)
    if part not in MODULES:
        formats = importlib.import_module(f"{PACKAGE}.formats.format")
        is_fixed, name = part.endswith(FIXED_END), part.removesuffix(FIXED_END)
        names.add(formats.export_panel(name) if is_fixed else formats.export_format(name))
    context = cpu_target.target_context
    context._internal_codegen = translator = _Translator("mlx_engine")
    exports, libraries, kept = context.create_module("exports"), [], set()
    for name, (function, kind) in jit.EXPORTS.items():
        if function.__module__ in names:
            dispatcher = jit.jit(function)
            dispatcher.compile(kind.args)
            found = dispatcher.overloads[kind.args]
            _export(context, exports, name, kind, found.fndesc.llvm_func_name)
            libraries.append(found.library)
            kept.add(name)
    _stop_here(exports, "NRT_MemInfo_call_dtor")
    # The wrappers are linked first. Linking a library then takes only the functions that are needed.
    linked = binding.parse_assembly(str(exports))
    for library in libraries:
        linked.link_in(library._get_module_for_linking(), preserve=True)
    for function in linked.functions:
        if not function.is_declaration and function.name not in kept:
            function.linkage = "internal"
    return _optimized(translator, linked)


def _optimized(translator: Any, module: Any) -> bytes:
    """Return machine code, with the same optimisation passes as Numba's own."""
    module.data_layout = translator._data_layout
    passes, builder = translator._function_pass_manager()
    for function in module.functions:
        passes.run(function, builder)
    passes, builder = translator._module_pass_manager()
    passes.run(module, builder)
    return bytes(translator._tm.emit_object(module))


def _export(context: Any, module: Any, name: str, kind: Any, mangled: str) -> None:
    """Add a C function that calls the Numba function, whose ABI has two extra arguments for exceptions."""
    inner = ir.Function(module, context.call_conv.get_function_type(kind.return_type, kind.args), mangled)
    arguments = [context.get_value_type(argument) for argument in kind.args]
    outer = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    builder = ir.IRBuilder(outer.append_basic_block())
    context.call_conv.call_function(builder, inner, kind.return_type, kind.args, outer.args)
    builder.ret_void()


def _stop_here(module: Any, name: str) -> None:
    """Define Numba's array destructor as llvm.trap: kernels allocate no arrays and never call it."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    builder.unreachable()


def main(part: str) -> None:
    """Write the object file to stdout."""
    sys.stdout.buffer.write(sealed(compiled(part)))
