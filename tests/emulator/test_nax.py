"""Kernels of MLX and mlx-kquant for an M5 agree with NumPy over ragged sizes, in every order of threads and of sums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.emulator import RaceError, TensorError, library
from kernels.emulator.metal_library import WholeKernel
from tests.emulator.nax import CASES, HEADERS, KQUANT, KQUANT_CASES, Case, Launch

pytestmark = pytest.mark.slow


def run(kernel: WholeKernel, launch: Launch, **how: Any) -> np.ndarray[Any, Any]:
    grid = tuple(a * b for a, b in zip(launch.groups, launch.threads, strict=True))
    found = kernel(launch.buffers, grid=grid, threadgroup=launch.threads, **how)[launch.written]
    return np.array(found.tolist(), np.float64).reshape(launch.expected.shape)


def agrees(case: Case, folders: list[str | Path]) -> None:
    """Check a kernel over its sizes."""
    file = library(case.text, folders)
    for i, size in enumerate(case.sizes):
        launch = case.launch(size, np.random.default_rng(i))
        kernel = file.function(case.name, launch.constants)
        for build, seed in (("spaces", 0), ("spaces", 2), ("races", 1)):
            how = {"build": build, "seed": seed, "layout": case.layout}
            if case.races and build == "races":
                with pytest.raises(
                    RaceError, match=rf"race: .*(.|\n)*{case.races.replace('(', '.').replace(')', '.')}"
                ):
                    run(kernel, launch, **how)
                continue
            found = run(kernel, launch, **how)
            assert np.isfinite(found).all(), (size, build)
            error = np.abs(found - launch.expected).max()
            assert error <= case.tolerance * np.abs(launch.expected).max(), (size, build, seed, error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_of_mlx_agrees_with_numpy(case: Case) -> None:
    agrees(case, [HEADERS])


@pytest.mark.skipif(not KQUANT, reason="MLX_KQUANT does not name the folder of mlx-kquant's source")
@pytest.mark.parametrize("case", KQUANT_CASES, ids=lambda case: case.name)
def test_a_kernel_of_mlx_kquant_agrees_with_numpy(case: Case) -> None:
    agrees(case, [Path(os.environ["MLX_KQUANT"]), HEADERS])


def test_they_rely_on_one_layout() -> None:
    case = CASES[0]
    launch = case.launch(case.sizes[1], np.random.default_rng(0))
    kernel = library(case.text, [HEADERS]).function(case.name, launch.constants)
    with pytest.raises(TensorError, match=r"relies on one GPU's layout, at nax.h, line \d+: `gemm_op.run"):
        run(kernel, launch)


def test_a_descriptor_for_another_number_of_rows() -> None:
    """Squares above each other are multiplied with a descriptor for two beside each other; none of MLX does."""
    case = CASES[0]
    launch = case.launch(case.sizes[0], np.random.default_rng(0))
    wrong = case.text.replace("gemm<half, 64, 128, 64, 2, 4,", "gemm<half, 64, 128, 64, 2, 8,")
    kernel = library(wrong, [HEADERS]).function(case.name, launch.constants)
    with pytest.raises(TensorError, match=r"element 8 of a cooperative tensor, but this thread has 8 elements, at nax"):
        kernel(launch.buffers, grid=(32, 8, 2), threadgroup=(32, 8, 2), layout="m5")
