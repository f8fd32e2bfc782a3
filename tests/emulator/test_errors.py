"""What the emulator says of wrong kernels and wrong calls, and what an error leaves behind."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import (
    ConvergenceError,
    EmulatorError,
    LaunchError,
    MemoryFaultError,
    RaceError,
    UndefinedBehaviorError,
    metal_kernel,
    unavailable,
)
from tests.emulator.test_emulator import COPY, X, call, simple
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def test_an_error_says_where_and_what_to_do():
    source = "\n  const uint i = thread_position_in_grid.x;\n  if (i == 37)\n    y[i] = x[i + 40];\n"
    with pytest.raises(MemoryFaultError) as caught:
        call(simple(source), X, threadgroup=(16, 1, 1))
    assert str(caught.value).splitlines() == [
        "kernel 'simple': read input 'x' (256 bytes), at byte 308: 52 bytes past its end, "
        "near body, line 4: `y[i] = x[i + 40];`",
        "  threadgroup (2, 0, 0), thread (5, 0, 0), lane 5",
        "  expected an address inside; check the index, or guard it",
    ]


def test_an_error_in_the_header_says_so():
    kernel = simple("y[0] = far(x);", header="float far(const device float* x) {\n  return x[100];\n}\n")
    with pytest.raises(MemoryFaultError, match="near header, line 2: `return x"):
        call(kernel, X)


def test_private_memory_has_an_end():
    source = (
        "float big[40000]; for (int i = 0; i < 40000; i++) big[(i * 7) % 40000] = x[i % 64]; y[0] = big[int(x[1])];"
    )
    with pytest.raises(MemoryFaultError, match="private memory is full"):
        call(simple(source), X)


def test_a_lost_pointer_belongs_to_no_buffer():
    with pytest.raises(MemoryFaultError, match="belongs to no buffer"):
        call(simple("device float* p = (device float*)(size_t(x[1]) << 46); p[0] = 1.0f;"), X)


WRONG = [
    ("y[100] = 0.0f;", "spaces", MemoryFaultError),
    ("if (thread_position_in_grid.x == 3) threadgroup_barrier(mem_flags::mem_none);", "spaces", ConvergenceError),
    ("y[int(x[1] * 5.0f) / int(x[0])] = 0.0f;", "undefined", UndefinedBehaviorError),
    ("int i = int(x[1]) << 30; y[0] = i * 4;", "undefined", UndefinedBehaviorError),
    ("y[0] = x[thread_position_in_grid.x];", "races", RaceError),
]


@pytest.mark.parametrize(("source", "build", "kind"), WRONG)
def test_after_an_error_all_is_as_before(source: str, build: str, kind: type[EmulatorError]):
    handlers = [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGINT)]
    was_enabled = faulthandler.is_enabled()
    right, wrong = simple(COPY), simple(source)
    for _ in range(3):
        with pytest.raises(kind):
            call(wrong, X, build=build)
        assert np.array_equal(call(right, X, (64,)), np.array(X))
    assert [signal.getsignal(s) for s in (signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGINT)] == handlers
    assert faulthandler.is_enabled() == was_enabled
    assert np.float32(2.0**-126) * np.float32(0.5) > 0  # denormals count again


@pytest.mark.slow
def test_ctrl_c_ends_a_kernel_that_does_not():
    kernel = simple("volatile float wait = 1.0f; while (wait > 0.0f) {} y[0] = wait;")
    kernel.prepare([([X], [mx.float32], None)])  # so that the signal does not meet the compiler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call(kernel, X)
    finally:
        stop.join()
        signal.signal(signal.SIGINT, before)
    assert np.array_equal(call(simple(COPY), X, (64,)), np.array(X))


def test_calls_from_several_threads_take_turns():
    kernels = [simple(f"y[thread_position_in_grid.x] = simd_sum(x[0]) + {i}.0f;") for i in (0, 1)] * 2
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        for _ in range(20):
            found[i] = call(kernels[i], X + 1, (64,))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [32.0, 33.0] * 2


ELSEWHERE = """
import ctypes, faulthandler, sys, threading, time
import mlx.core as mx
from kernels.emulator import metal_kernel
from kernels.emulator.runtime import turn
faulthandler.enable()
kernel = metal_kernel("wait", [], ["y"], "volatile float wait = y[0]; while (wait > 0.0f) {}")
one = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
kernel(inputs=[], init_value=0, **one)
threading.Thread(target=lambda: kernel(inputs=[], init_value=1, **one), daemon=True).start()
while turn.acquire(blocking=False):
    turn.release()
time.sleep(0.2)
ctypes.string_at(8)
"""


@pytest.mark.slow
def test_a_fault_of_another_thread_is_not_ours():
    """While a kernel runs, somebody else's fault goes to whoever handled it before: here Python's faulthandler."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=PATIENCE,
    )
    assert result.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in result.stderr


# ---- calls that do not fit ----


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": []}, r"inputs: expected 1 \(x\), found 0"),
        ({"output_shapes": []}, "output_shapes: expected 1"),
        ({"output_dtypes": [mx.float32] * 2}, "output_dtypes: expected 1"),
        ({"grid": (0, 1, 1)}, "grid .*expected three numbers from 1 on"),
        ({"grid": (4, 1)}, "grid .*expected three numbers"),
        ({"threadgroup": (-1, 1, 1)}, "threadgroup .*expected three numbers"),
        ({"grid": (2000, 1, 1), "threadgroup": (1025, 1, 1)}, "at most 1,024 threads, found 1,025"),
        ({"build": "fast"}, "build 'fast': expected one of spaces, undefined, races"),
        ({"guard": "middle"}, "guard 'middle': expected 'start' or 'end'"),
        ({"output_dtypes": ["float64"]}, "float64"),
        ({"seed": -1}, "seed"),
        ({"time_limit": 0}, "expected time_limit in seconds, above 0"),
        ({"print_from": (0, 0)}, "print_from of three numbers"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change: dict[str, Any], says: str):
    right = {"inputs": [X], "output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1)}
    with pytest.raises(LaunchError, match=says):
        simple(COPY)(**{**right, "threadgroup": (64, 1, 1), **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "my-kernel"}, "expected an identifier"),
        ({"output_names": []}, "at least one output"),
        ({"compile_options": {"math_mode": "wild"}}, "math_mode"),
        ({"compile_options": {"speed": "high"}}, "math_mode"),
    ],
)
def test_kernels_that_make_no_sense_are_refused(change: dict[str, Any], says: str):
    with pytest.raises(LaunchError, match=re.escape(says)):
        metal_kernel(**{"name": "k", "input_names": ["x"], "output_names": ["y"], "source": "", **change})
