"""The device that MLX uses on this machine, its memory settings, and the streams of the backends that use MLX.

MLX never ends the thread of a stream, so new backends reuse the streams of closed backends. When the interpreter exits,
MLX frees its streams while daemon threads may still run. A daemon thread that is then inside MLX would abort the
process. So at exit, this module waits for the running pass on each stream, and prevents further passes.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

import mlx.core as mx

from mlx_engine.backends.session_guard import SessionGuard
from mlx_engine.machine.forks import kept_over_forks


def kind() -> str:
    """Return the kind of MLX's default device: "metal", "cuda" or "cpu"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def description() -> str:
    """Return the kind of the device, with a GPU's name if MLX reports one, such as "metal (Apple M3 Max)"."""
    name = None if kind() == "cpu" else mx.device_info().get("device_name")
    return f"{kind()} ({name})" if name else kind()


def keep_weights_resident() -> None:
    """On Metal, set MLX's wired memory limit to the size that Metal recommends, so that weights are not paged out.

    The limit applies to the whole process. It must not change during a computation, so call this before the first
    computation.
    """
    if kind() == "metal":
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


# The most seconds to wait, when the interpreter exits, for the forward pass on each stream.
PATIENCE = 10.0

# The streams of closed backends, as pairs: the id of the process that created the stream, and the stream.
_idle: list[tuple[int, mx.Stream]] = []
_taking = kept_over_forks(threading.Lock())
_used: weakref.WeakSet[DeviceStream] = weakref.WeakSet()


class DeviceStream:
    """An MLX stream for one backend. Only one thread at a time may use the stream.

    When this object is closed or collected, other backends may reuse the stream.
    """

    def __init__(self, device: mx.Device, guard: SessionGuard) -> None:
        self.stream, self.guard = _take(device), guard
        self.close = weakref.finalize(self, _idle.append, (os.getpid(), self.stream))
        self.close.atexit = False
        _used.add(self)


def _take(device: mx.Device) -> mx.Stream:
    """Return an idle stream that this process has created for the device, or a new stream."""
    with _taking:
        for i, (process, stream) in enumerate(_idle):
            # A forked process cannot use its parent's streams: it does not have their threads.
            if stream.device == device and process == os.getpid():
                return _idle.pop(i)[1]
    return mx.new_thread_unsafe_stream(device)


@atexit.register
def _end_sessions() -> None:
    for used in list(_used):
        if used.guard.hold_for_ever(PATIENCE):
            mx.synchronize(used.stream)
