"""The door to the GPU, and what can be imported without one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels import launch as door
from kernels.kernel import Kernel
from kernels.launch import EXECUTORS, ExecutorUnavailableError, counted, launch, planned, unavailable, use

DOUBLE = Kernel("double", ("x",), ("y",), "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] * 2.0f;")


def double(x: mx.array) -> mx.array:
    (y,) = launch(
        DOUBLE, [x], grid=(x.size, 1, 1), threadgroup=(4, 1, 1), output_shapes=[x.shape], output_dtypes=[mx.float32]
    )
    return y


def test_a_kernel_of_ones_own_runs_in_the_emulator():
    with use("emulator"):
        assert door.executor() == "emulator"
        np.testing.assert_array_equal(np.array(double(mx.arange(8, dtype=mx.float32))), 2 * np.arange(8))


def test_launches_are_counted_in_each_context_around_them():
    x = mx.zeros(4)
    with planned(), counted() as outer:
        double(x)
        with counted() as inner:
            double(x)
            double(x)
        double(x)
    double_twice = Counter(double=2)
    assert inner == double_twice
    assert outer == Counter(double=4)
    with planned():
        double(x)
    assert outer == Counter(double=4)


def test_a_planned_launch_is_written_down_and_not_run():
    with planned() as launches:
        y = double(mx.ones(8))
    assert [entry.kernel for entry in launches] == [DOUBLE]
    assert launches[0].grid == (8, 1, 1)
    assert not np.array(y).any()


def test_a_grid_of_partial_threadgroups_is_refused():
    with pytest.raises(ValueError, match=r"double: expected a grid of whole threadgroups, found \(6, 1, 1\) threads"):
        double(mx.zeros(6))


@pytest.mark.parametrize("name", [name for name in EXECUTORS if unavailable(name)])
def test_what_is_missing_is_said(name: door.ExecutorName):
    with pytest.raises(ExecutorUnavailableError, match=f"kernels cannot run on '{name}': .*needs"), use(name):
        pass
    assert door.executor() != name


def test_an_unknown_executor_is_refused():
    with pytest.raises(ValueError, match="expected one of metal, cuda, emulator, found 'vulkan'"), use("vulkan"):
        pass


def test_nobody_can_run_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "unavailable", lambda name: f"no {name} here")
    door._default.cache_clear()
    with pytest.raises(ExecutorUnavailableError, match=r"^metal: no metal here; cuda: no cuda here; emulator: no emul"):
        double(mx.zeros(4))
    door._default.cache_clear()


def test_the_choice_ends_with_its_context_even_when_it_fails():
    before = door.executor()
    with pytest.raises(KeyError), use("emulator"):
        raise KeyError
    assert door.executor() == before


def test_each_executor_builds_a_kernel_once():
    assert door.built(DOUBLE, "emulator") is door.built(Kernel(**vars(DOUBLE)), "emulator")


def test_what_metal_would_not_take_is_refused():
    with pytest.raises(ValueError, match="expected a name that C accepts"):
        Kernel("no-name", (), ("y",), "")


def test_kernels_is_imported_without_a_gpu_and_without_the_engine():
    script = (
        "import sys, kernels\n"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules, 'import kernels costs something'\n"
        "[getattr(kernels, name) for name in kernels.__all__]\n"
        "assert 'mlx_engine' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_public_names_are_sorted_and_no_others_are_there():
    assert kernels.__all__ == sorted(kernels.__all__)
    assert set(kernels.__all__) <= set(dir(kernels))
    with pytest.raises(AttributeError, match="module 'kernels' has no attribute 'matmul'"):
        _ = kernels.matmul
