"""One line in place of a crash if a mapped file is truncated while it is in use.

Access to the lost part raises SIGBUS in the thread that reads: in a compiled kernel, perhaps, or while another thread
has the interpreter's lock. A Python handler would never run. So the handler is machine code, which LLVM makes of these
few lines: it writes a message and exits. Not noticed are files that are changed without a change of their length, and
the end of the last page (up to 4,095 bytes) after a truncation: it reads as zeros.
"""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from typing import Any

from mlx_engine.commands.console import FAILED
from mlx_engine.commands.values import plain

_HANDLER = """
declare i64 @write(i32, i64, i64)
declare void @_exit(i32)
define void @handler(i32 %signal) {{
  %written = call i64 @write(i32 2, i64 {address}, i64 {length})
  call void @_exit(i32 {code})
  unreachable
}}
"""
# What the handler needs for as long as the process lives: its message and its machine code.
_KEPT: list[Any] = []


def say_when_cut(path: Path) -> None:
    """Install the handler. The message names `path`, the first file that is read."""
    if not hasattr(signal, "SIGBUS") or _KEPT:
        return
    from llvmlite import binding

    text = (
        f"\nerror: {plain(str(path))}: expected it, and the other files of the model, to keep their length while they "
        "are in use, found that one was truncated; write a new file under another name and move it into place, and "
        "start again\n"
    ).encode("utf-8", "backslashreplace")
    message = ctypes.create_string_buffer(text)
    code = _HANDLER.format(address=ctypes.addressof(message), length=len(text), code=FAILED)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code), machine)
    engine.finalize_object()
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    install(signal.SIGBUS, engine.get_function_address("handler"))
    _KEPT.extend((message, engine))
