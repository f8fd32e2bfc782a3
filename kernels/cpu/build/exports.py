"""Compile parts of the kernels to object files. This module runs in child processes that `machine_code.py` starts.

A part is a set of kernels that are compiled together. `library.MODULES` maps the names of parts to their modules. The
float32 kernels of a format are also a part, and so are its fixed-point kernels.

By default, Numba optimises each function alone and again in every caller, and emits machine code and a wrapper for each
function. Only the machine code of exported kernels is needed here. So each function is translated to LLVM IR once per
process, and the IR of all functions of a part is linked and optimised once, together.

Two thirds of the compile time is Numba's translation to IR, which runs in Python. So a lower optimisation level of LLVM
would save only 3 percent. Python's garbage collector is off, which saves an eighth.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, codegen, config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from . import jit
from .library import FIXED_END, MODULES, PACKAGE, sealed

# A process collects its garbage, 30 MB per part, each time it has compiled this number of parts.
MANY = 8


class _Unoptimized(codegen.CPUCodeLibrary):  # type: ignore[misc]
    """The LLVM IR of a function as Numba translates it: not optimised, and not linked with functions that it calls."""

    def __init__(self, translator: Any, name: str) -> None:
        codegen.CodeLibrary.__init__(self, translator, name)
        self.modules: list[Any] = []
        self._linking_libraries: list[_Unoptimized] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.add_llvm_module(binding.parse_assembly(cgutils.normalize_ir_text(str(ir_module))))

    def add_llvm_module(self, ll_module: Any) -> None:
        self.modules.append(ll_module)

    def add_linking_library(self, library: _Unoptimized) -> None:
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: this process calls no compiled function."""
        return 0

    def all_modules(self, seen: set[_Unoptimized]) -> Iterable[Any]:
        """Yield the modules of this function and of all functions that it calls, except of those in `seen`."""
        waiting = [self]
        while waiting:
            library = waiting.pop()
            if library not in seen:
                seen.add(library)
                waiting += library._linking_libraries
                yield from library.modules


class Translator(codegen.JITCPUCodegen):  # type: ignore[misc]
    """A code generator for this machine or another one. The generated code is not loaded.

    Attributes:
        triple: LLVM's target triple; "" is this machine. With any other triple, the code is position-independent, so
            that a linker can put it into a shared library (`prebuilt.py`).
    """

    _library_class = _Unoptimized
    triple = ""

    @staticmethod
    def start(triple: str = "") -> Translator:
        """Make Numba compile for export from now on; return the code generator. Call this before importing a kernel."""
        gc.disable()
        jit.for_export()
        Translator.triple = triple
        if triple:
            binding.initialize_all_targets()
            binding.initialize_all_asmprinters()
            binding.get_process_triple = lambda: triple
        cpu_target.target_context._internal_codegen = found = Translator("mlx_engine")
        return found

    def _init(self, llvm_module: Any) -> None:
        """Create LLVM's target machine, but no execution engine."""
        options: dict[str, Any] = {"opt": config.OPT}
        self._tm_features = self._customize_tm_features()
        self._customize_tm_options(options)
        if self.triple:
            options |= {"reloc": "pic", "codemodel": "default", "jit": False}
        self._tm = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(**options)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _add_module(self, module: Any) -> None:
        pass

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: Numba's environments are only needed by code that calls Python, and kernels never call Python."""

    def optimized(self, module: Any, libraries: Iterable[_Unoptimized], kept: Iterable[str]) -> Any:
        """Link a module with libraries and optimise it with Numba's LLVM passes; the names in `kept` stay exported.

        The passes over single functions take a twentieth of the compile time. Without them, kernels are up to a tenth
        slower.
        """
        seen, names = set[_Unoptimized](), set(kept)
        for library in libraries:
            for each in library.all_modules(seen):
                module.link_in(each, preserve=True)
        for value in (*module.functions, *module.global_variables):
            if not value.is_declaration and value.name not in names:
                value.linkage = "internal"
        module.data_layout = self._data_layout
        passes, builder = self._function_pass_manager()
        for function in module.functions:
            passes.run(function, builder)
        passes, builder = self._module_pass_manager()
        passes.run(module, builder)
        return module


def translated(function: Any, arguments: Sequence[Any]) -> Any:
    """Translate a function to LLVM IR for these argument types; return Numba's result, whose `library` has the IR."""
    dispatcher = jit.jit(function)
    dispatcher.compile(tuple(arguments))
    (found,) = dispatcher.overloads.values()
    return found


@global_compiler_lock
def compiled(translator: Translator, part: str) -> bytes:
    """Return the object file of a part of the kernels."""
    modules = {f"{PACKAGE}.{name}" for name in MODULES.get(part, ())}
    for name in modules:
        importlib.import_module(name)
    names = {name for name, (function, _) in jit.EXPORTS.items() if function.__module__ in modules}
    if part not in MODULES:
        formats = importlib.import_module(f"{PACKAGE}.formats.format")
        is_fixed, name = part.endswith(FIXED_END), part.removesuffix(FIXED_END)
        names = set(formats.export_panel(name) if is_fixed else formats.export_format(name))
    exports, libraries = cpu_target.target_context.create_module("exports"), []
    for name in sorted(names):
        function, kind = jit.EXPORTS[name]
        found = translated(function, kind.args)
        _export(exports, name, kind, found.fndesc.llvm_func_name)
        libraries.append(found.library)
    _stop_here(exports, "NRT_MemInfo_call_dtor")
    module = translator.optimized(binding.parse_assembly(str(exports)), libraries, names)
    return bytes(translator._tm.emit_object(module))


def _export(module: Any, name: str, kind: Any, mangled: str) -> None:
    """Add a C function `name` that calls the Numba function whose mangled name is `mangled`.

    A Numba function has two more arguments: the addresses for its result and for its exception.
    """
    context = cpu_target.target_context
    inner = ir.Function(module, context.call_conv.get_function_type(kind.return_type, kind.args), mangled)
    arguments = [context.get_value_type(argument) for argument in kind.args]
    outer = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    builder = ir.IRBuilder(outer.append_basic_block())
    context.call_conv.call_function(builder, inner, kind.return_type, kind.args, outer.args)
    builder.ret_void()


def _stop_here(module: Any, name: str) -> None:
    """Define Numba's array destructor `name` as a trap. It is never called, because kernels allocate no arrays."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    builder.unreachable()


def main(parts: Sequence[str], triple: str = "") -> None:
    """Write each part to stdout once it is compiled: the length of the rest (8 bytes), a checksum, the object file."""
    translator = Translator.start(triple)
    for i, part in enumerate(parts, 1):
        code = sealed(compiled(translator, part))
        sys.stdout.buffer.write(len(code).to_bytes(8, "little") + code)
        sys.stdout.buffer.flush()
        if i % MANY == 0:
            gc.collect()
