"""The calls of `mx.fast.metal_kernel` that a program makes itself, checked in the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import (
    LaunchError,
    MemoryFaultError,
    OrderError,
    RaceError,
    emulate,
    intercept,
    metal_kernel,
    unavailable,
)
from kernels.emulator.intercept import difference
from kernels.launch import unavailable as executor_unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

X = mx.arange(40, dtype=mx.float32)


def twice(x: mx.array, threads: int | None = None, body: str = "y[i] = 2.0 * x[i];") -> mx.array:
    """A program's own function: it makes a kernel as MLX's documentation shows."""
    kernel = mx.fast.metal_kernel(
        name="twice", input_names=["x"], output_names=["y"], source="uint i = thread_position_in_grid.x; " + body
    )
    return kernel(
        inputs=[x],
        grid=(threads or x.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        stream=mx.gpu,
    )[0]


def test_a_program_runs_as_it_is_and_is_checked():
    with emulate() as seen:
        assert mx.array_equal(twice(X), 2 * X)
        with pytest.raises(MemoryFaultError, match=r"read input 'x' .*just past its end"):
            twice(X, threads=64)
    (call,) = seen.calls
    assert (call.kernel, call.grid, call.runs) == ("twice", (40, 1, 1), 5)
    assert seen.made == ["twice", "twice"]
    assert [type(error) for error in seen.findings] == [MemoryFaultError]


def test_a_kernel_without_inputs():
    with emulate():
        kernel = mx.fast.metal_kernel(name="three", input_names=[], output_names=["y"], source="y[0] = 3;")
        call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.int32]}
        assert kernel(inputs=[], **call)[0].tolist() == [3]


def test_mlx_is_as_before_afterwards():
    names = [(mx.fast, "metal_kernel"), (mx, "gpu"), (mx, "device_info"), (mx, "default_device")]
    names.append((mx.metal, "is_available"))
    before = [getattr(where, name) for where, name in names]
    with emulate():
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        assert mx.device_info()["max_recommended_working_set_size"] > 0
    assert [getattr(where, name) for where, name in names] == before
    with pytest.raises(KeyError), emulate():
        raise KeyError
    assert [getattr(where, name) for where, name in names] == before
    with emulate(pretend=False):
        assert mx.metal.is_available() == before[-1]()


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU is not pretended where there is one")
def test_the_default_device_looks_like_a_gpu_and_computes_on_the_cpu():
    with emulate():
        device = mx.default_device()
        assert (str(device), device.type) == ("Device(gpu, 0)", mx.DeviceType.gpu)
        assert [device] * 3 == [mx.gpu, mx.DeviceType.gpu, mx.default_device()]
        assert {device: 1}[mx.default_device()] == 1
        mx.set_default_device(device)
        with mx.stream(device):
            assert mx.add(X, X, stream=mx.default_stream(device)).tolist() == (2 * X).tolist()
    assert str(mx.default_device()) == "Device(cpu, 0)"
    with emulate(pretend=False):
        assert str(mx.default_device()) == "Device(cpu, 0)"


def test_our_own_launches_do_not_take_it_for_a_gpu():
    reason = executor_unavailable("metal")
    with emulate():
        assert executor_unavailable("metal") == reason


@pytest.mark.parametrize("was_on", [True, False])
def test_compiled_functions_run_op_by_op(was_on: bool):
    def traced() -> bool:
        try:
            mx.compile(lambda x: x + x.item())(mx.array(1))
        except ValueError:
            return True
        return False

    compiled = mx.compile(twice)
    if not was_on:
        mx.disable_compile()
    try:
        with emulate():
            assert mx.array_equal(compiled(X), 2 * X)
        assert traced() is was_on
    finally:
        mx.enable_compile()


def exported(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], None]:
    return lambda x: mx.export_function(lambda _: None, function, x)


@pytest.mark.parametrize("change", [mx.compile, mx.vmap, exported])
def test_arrays_without_values_are_refused_by_name(change: Callable[[Any], Any]):
    kernel = metal_kernel("named", ["x"], ["y"], "y[0] = x[0];")

    def function(x: mx.array) -> mx.array:
        return kernel(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)], output_dtypes=[x.dtype])[
            0
        ]

    with pytest.raises(LaunchError, match=r"(?s)kernel 'named': called by .* no values yet.*for mx.export_function: "):
        change(function)(mx.ones((2, 9)))


def test_gradients_are_as_in_mlx_refused_or_the_programs_own():
    @mx.custom_function
    def doubled(x: mx.array) -> mx.array:
        return twice(x)

    @doubled.vjp
    def backward(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        return 2 * cotangent

    with emulate():
        assert mx.array_equal(mx.grad(lambda x: (doubled(x) * X).sum())(X), 2 * X)
        with pytest.raises(LaunchError, match="kernel 'twice': MLX has no gradient of a metal_kernel"):
            mx.grad(lambda x: twice(x).sum())(X)


def test_results_that_depend_on_the_order_are_found_with_their_lines():
    with emulate(), pytest.raises(RaceError, match=r"(?s)output 'y'.*wrote it at body, line 1"):
        twice(X, body="y[0] = x[i];")
    once = "\nthreadgroup atomic_uint n; if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);"
    counted = once + "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    counted += "y[i] = atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);"
    with (
        emulate(),
        pytest.raises(
            OrderError,
            match=r"(?s)kernel 'twice': y\[0\] is 0.0 with seed 0, 31.0 with seed 1\n.*"
            r"thread \(0, 0, 0\), lane 0 wrote it last, at body, line 3",
        ),
    ):
        twice(X[:32], body=counted)
    with emulate(seeds=[0]):
        assert np.array_equal(np.array(twice(X[:32], body=counted)), np.arange(32))


def test_results_that_depend_on_the_build_are_reported_with_the_build(monkeypatch: pytest.MonkeyPatch):
    found = {"spaces": 1.0, "undefined": 2.0}
    monkeypatch.setattr(intercept.CheckedKernel, "_run", lambda self, given, build, seed: [mx.array([found[build]])])
    with (
        emulate(builds=list(found), seeds=[0]),
        pytest.raises(OrderError, match=r"y\[0\] is 1.0 with seed 0, 2.0 with seed 0 of build 'undefined'"),
    ):
        twice(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"builds": []}, "expected at least one build"),
        ({"builds": ["race"]}, "emulate, build 'race': expected one of spaces, undefined, races"),
        ({"seeds": [-1]}, "emulate, seed -1"),
        ({"lanes": "few"}, "emulate, lanes 'few': expected one of active, all"),
    ],
)
def test_unknown_switches_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(LaunchError, match=message), emulate(**options):
        pass


def test_switches_reach_the_kernels():
    with emulate(lanes="all"), pytest.raises(Exception, match="24 lane"):
        twice(X, body="if (i < 8) y[i] = simd_sum(x[i]); else if (i > 63) y[i] = simd_sum(0.0f);")
    with emulate(suffixes=True), pytest.raises(Exception, match=r"`2\.0` has no suffix"):
        twice(X)


PROGRAM = """
import mlx.core as mx
kernel = mx.fast.metal_kernel(name="early", input_names=["x"], output_names=["y"],
                              source="y[thread_position_in_grid.x] = 1 + x[thread_position_in_grid.x];")
def run(threads):
    return kernel(inputs=[mx.zeros(12)], grid=(threads, 1, 1), threadgroup=(12, 1, 1), output_shapes=[(12,)],
                  output_dtypes=[mx.float32])[0]
"""
TESTS = """
import program, pytest
def test_right():
    assert program.run(12).tolist() == [1.0] * 12
def test_wrong():
    program.run(13)
def test_fixture(emulated_metal):
    import importlib
    assert importlib.reload(program).run(12).sum() == 12
    assert [call.kernel for call in emulated_metal.calls] == ["early"]
"""


@pytest.mark.slow
def test_the_plugin_of_pytest(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_program.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kernels.emulator.pytest_plugin", "--emulate-metal",
               "-p", "no:cacheprovider", "-o", "addopts=", str(tmp_path)]  # fmt: skip
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "checked in the Metal emulator: 1 kernels, 1 calls, 1 mistakes\nkernel 'early': read" in done.stdout
    assert "kernel 'early': read input 'x' (48 bytes), at byte 48: just past its end" in done.stdout


@pytest.mark.filterwarnings("error")
def test_nearly_equal_results_may_have_infinities() -> None:
    one, other = mx.array([-float("inf"), 64.0, float("nan")]), mx.array([-float("inf"), 64.5, float("nan")])
    assert difference(one, other, nearly=True) is None
    assert difference(one, other) == (1,)
    assert difference(one, -other, nearly=True) == (0,)
