"""All exported kernels as one object file, which other processes load without Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from kernels.cpu import attention, embedding, heads, jit, jobs, layers, linear

# Importing a module exports its kernels.
MODULES = (attention, embedding, heads, jobs, layers, linear)


@global_compiler_lock
def build() -> bytes:
    """Compile what has been exported; some 20 seconds."""
    context = cpu_target.target_context
    # A code generator of its own: what is exported here must not get into the way of other users of Numba.
    codegen = type(context.codegen())("mlx_engine")
    library = codegen.create_library("mlx_engine_kernels")
    library.enable_object_caching()
    module = context.create_module("exports")
    for name, (function, kind) in jit.EXPORTS.items():
        dispatcher = jit.jit(function)
        dispatcher.compile(kind.args)
        compiled = dispatcher.overloads[kind.args]
        _export(context, module, name, kind, compiled.fndesc.llvm_func_name)
        library.add_linking_library(compiled.library)
    _stop_here(module, "NRT_MemInfo_call_dtor")
    library.add_ir_module(module)
    library.finalize()
    return bytes(library._get_compiled_object())


def _export(context: Any, module: Any, name: str, kind: Any, mangled: str) -> None:
    """A C function that calls Numba's: that one has two more arguments, for exceptions, which there are none of."""
    inner = ir.Function(module, context.call_conv.get_function_type(kind.return_type, kind.args), mangled)
    arguments = [context.get_value_type(argument) for argument in kind.args]
    outer = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    builder = ir.IRBuilder(outer.append_basic_block())
    context.call_conv.call_function(builder, inner, kind.return_type, kind.args, outer.args)
    builder.ret_void()


def _stop_here(module: Any, name: str) -> None:
    """Numba's code frees arrays that it has allocated; kernels allocate none, and so never get there."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    builder.unreachable()
