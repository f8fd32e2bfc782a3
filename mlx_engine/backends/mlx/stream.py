"""The streams of the `mlx` backends: a stream has a thread that MLX never ends, so new backends use old streams.

When the interpreter exits, MLX frees its streams while threads that are no daemons have ended. A daemon thread that is
in MLX then aborts the process. So at exit each stream waits for the pass of another thread, and lets no other begin.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

import mlx.core as mx

from mlx_engine.backends.session_guard import SessionGuard
from mlx_engine.machine.forks import kept_over_forks

# Seconds that the exit of the interpreter waits for a forward pass of a daemon thread.
PATIENCE = 10.0

# The streams of backends that are gone, with the process that made them.
_idle: list[tuple[int, mx.Stream]] = []
_taking = kept_over_forks(threading.Lock())
_used: weakref.WeakSet[DeviceStream] = weakref.WeakSet()


class DeviceStream:
    """A stream that no other backend uses, until it is closed or collected. Several threads may use it, in turns."""

    def __init__(self, device: mx.Device, guard: SessionGuard) -> None:
        self.stream, self.guard = _take(device), guard
        self.close = weakref.finalize(self, _idle.append, (os.getpid(), self.stream))
        self.close.atexit = False
        _used.add(self)


def _take(device: mx.Device) -> mx.Stream:
    """Return a stream of this process that is not used, or a new one."""
    with _taking:
        for i, (process, stream) in enumerate(_idle):
            if stream.device == device and process == os.getpid():  # a parent's stream has no thread here
                return _idle.pop(i)[1]
    return mx.new_thread_unsafe_stream(device)


@atexit.register
def _end_sessions() -> None:
    for used in list(_used):
        if used.guard.hold_for_ever(PATIENCE):
            mx.synchronize(used.stream)
