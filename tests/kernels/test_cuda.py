"""The same kernels for CUDA: what the translation does, and that NVIDIA's compiler takes it."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from kernels.kernel import Kernel
from kernels.launch import cuda_kernel, translated
from kernels.metal.cases import TYPES, cases
from tests.kernels import nvrtc

KERNELS = sorted({case.kernel for case in cases()})


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("threadgroup float parts[KS > 1 ? 4 : 1];", "__shared__ float parts[KS > 1 ? 4 : 1];"),
        ("threadgroup TILE vectors[BM * 36];", "__shared__ TILE vectors[BM * 36];"),
        ("((const device uint4*)wq)[i / 16]", "((const uint4*)wq)[i / 16]"),
        ("void f(thread float* s, const thread T* x)", "void f(float* s, const T* x)"),
        ("void f(threadgroup T* p, float4 x)", "void f(T* p, float4 x)"),
        ("x; // per thread and device\ny;", "x; \ny;"),
        ("thread_index_in_threadgroup threadgroup_barrier(f)", "thread_index_in_threadgroup threadgroup_barrier(f)"),
    ],
)
def test_address_spaces_go_and_nothing_else(metal: str, cuda: str):
    assert translated(metal) == cuda


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_address_space_is_left(kernel: str):
    text = cases(kernel)[0].launch().kernel
    left = re.compile(r"\b(device|constant|thread|threadgroup)\b")
    assert left.search(translated(text.source)) is None
    assert left.search(translated(text.header)) is None


def test_what_cuda_cannot_do_is_refused():
    for kernel in (
        Kernel("k", (), ("y",), "y[0] = 1.0f;", atomic_outputs=True),
        Kernel("k", (), ("y",), "y[0] = 1.0f;", math_mode="fast"),
    ):
        with pytest.raises(ValueError, match="CUDA has no atomic outputs, and no math mode"):
            cuda_kernel(kernel)


@pytest.mark.skipif(mx.cuda.is_available(), reason="this MLX has CUDA")
def test_without_cuda_a_kernel_cannot_be_made():
    with pytest.raises(RuntimeError, match="No CUDA back-end"):
        cuda_kernel(Kernel("k", (), ("y",), "y[0] = 1.0f;"))


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Compiler:
    folder = nvrtc.toolkit()
    if folder is None:
        pytest.skip("NVIDIA's run-time compiler is not installed; nvrtc.py says how")
    return nvrtc.Compiler(folder)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nvidias_compiler_takes_it(compiler: nvrtc.Compiler, kernel: str):
    launch = max((case.launch() for case in cases(kernel)), key=lambda launch: sum(x.size for x in launch.inputs))
    text = compiler.ptx(nvrtc.source(launch))
    assert ".entry" in text
    # Arrays that could not stay in registers would lie in local memory.
    assert ".local" not in text


@pytest.mark.parametrize("type_", TYPES)
def test_nvidias_compiler_takes_every_stored_type(compiler: nvrtc.Compiler, type_: str):
    launch = next(case.launch() for case in cases("matvec") if type_ in case.label)
    assert ".local" not in compiler.ptx(nvrtc.source(launch))


def test_nvidias_compiler_says_what_is_wrong(compiler: nvrtc.Compiler):
    text = nvrtc.source(cases("matvec")[0].launch())
    with pytest.raises(ValueError, match='identifier "sums" is undefined'):
        compiler.ptx(text.replace("float sums[M * R], squares[1];", ""))
