"""Memory access in compiled code: arrays at addresses, atomic words, and calls of functions at addresses.

A task is a function that processes a chunk of a job (`jobs.py`). It gets its arrays as addresses, because worker
threads run compiled code without Python objects.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from .jit import jit

# The nominal length of every array at an address, whose real length is unknown here; bounds are not checked.
_LENGTH = 1 << 48
_WORD = ir.IntType(64)


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return pointer


def _array_of(kind: Any) -> Any:
    pointer_at = _pointer_to(kind)

    @jit
    def array_at(address: int) -> Any:
        return carray(pointer_at(address), _LENGTH)

    return array_at


# Each of the functions `floats` to `ints` returns the array at an address, with elements of one type in `_KINDS`.
_KINDS = (types.float32, types.float64, types.uint8, types.int64, types.int16, types.int32)
floats, doubles, raw, words, shorts, ints = map(_array_of, _KINDS)


@intrinsic
def hidden(typing: Any, value: Any) -> Any:
    """Return `value`, an int64, and hide its origin from LLVM's optimiser.

    If the value is an address, LLVM assumes nothing about the memory there. If it is the number of iterations of a
    loop, LLVM does not unroll the loop.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0", [args[0]], side_effect=False)

    return types.int64(types.int64), generate


@intrinsic
def word(typing: Any, value: Any) -> Any:
    """Return the bits of a float64 as an int64; jobs store float64s in this form."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return types.int64(types.float64), generate


@intrinsic
def number(typing: Any, value: Any) -> Any:
    """Return the float64 whose bits are `value`, an int64: the inverse of `word`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


def _at(context: Any, builder: Any, signature: Any, words: Any, index: Any) -> Any:
    return builder.gep(context.make_array(signature.args[0])(context, builder, words).data, [index])


@intrinsic
def read(typing: Any, words: Any, index: Any) -> Any:
    """Load `words[index]` atomically. If `write` stored it, the storing thread's earlier writes are visible here."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(context, builder, signature, *args), "seq_cst", 8)

    return types.int64(words, types.int64), generate


@intrinsic
def write(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """Store `value` in `words[index]` atomically, for threads that load it with `read`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _at(context, builder, signature, *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@intrinsic
def fetch_add(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """Add `value` to `words[index]` atomically, and return the previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(context, builder, signature, *args[:2]), args[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), generate


@intrinsic
def call(typing: Any, task: Any, words: Any, first: Any, chunk: Any, scratch: Any) -> Any:
    """Run the task at address `task` on one chunk of the job whose words begin at `words[first]`.

    `chunk` is the number of the chunk, and `scratch` the address of the thread's scratch memory.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        task, words, first, chunk, scratch = args
        job = builder.gep(context.make_array(signature.args[1])(context, builder, words).data, [first])
        kind = ir.FunctionType(ir.VoidType(), [_WORD.as_pointer(), _WORD, _WORD])
        builder.call(builder.inttoptr(task, kind.as_pointer()), [job, chunk, scratch])
        return context.get_dummy_value()

    return types.void(types.int64, words, types.int64, types.int64, types.int64), generate


@intrinsic
def invoke(typing: Any, entry: Any, arguments: Any) -> Any:
    """Call the function at address `entry` with `arguments`, a tuple of int64s and float64s. It is never inlined."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(len(signature.args[1]))]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@intrinsic
def relax(typing: Any) -> Any:
    """Execute the spin-loop hint of x86 or arm64; on other processors, do nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        triple = builder.module.triple
        if triple.startswith(("x86_64", "i686")):
            text = "llvm.x86.sse2.pause"
            builder.call(builder.module.declare_intrinsic(text, (), ir.FunctionType(ir.VoidType(), [])), [])
        elif triple.startswith(("aarch64", "arm64")):
            hint = builder.module.declare_intrinsic(
                "llvm.aarch64.hint", (), ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            )
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), generate
