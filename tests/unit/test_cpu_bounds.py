"""Compiled products read no byte after the last row of a matrix, nor after the last vector.

Values that are read and not stored change no result. So the arrays end where a page without access begins, and a read
behind them ends the process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import traceback
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba")

from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.descriptors import Matrix, address
from mlx_engine.backends.parameters import Linear
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.random_blocks import SPREAD, random_blocks, random_groups

pytestmark = pytest.mark.skipif(os.name != "posix", reason="mprotect and fork as POSIX has them")

FORMATS = ("F32", "Q8_0", *SPREAD, "AFFINE4_G64_BF16", "AFFINE3_G64_F16", "AFFINE4_G64_F32")
# The weights of one block of any format.
K = 256
# Up to two rows in each of the four ranges that are multiplied together; a range may have none, or one row too few.
ROWS = range(1, 9)
# Panels of one vector and of several, and tiles.
TOKENS = (1, 3, 10)


def before_a_guard_page(array: np.ndarray) -> np.ndarray:
    """Return a copy that ends where a page begins that can be neither read nor written."""
    room = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    guard = ctypes.c_void_p(address(memory) + room)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = memory[room - array.nbytes : room].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def matrix_of(be: CompiledBackend, kind: str, n: int) -> Matrix:
    """Return an (n, K) matrix of the backend whose last byte lies before a guard page."""
    rng = np.random.default_rng(n)
    if kind.startswith("AFFINE"):
        weight = random_groups(rng, "w", kind, n, K)
    elif kind in SPREAD:
        weight = random_blocks(rng, "w", kind, n, K)
    else:
        weight = Weight.pack("w", rng.standard_normal((n, K)), BY_NAME[kind])
    prepared = be.prepare(weight)
    return replace(prepared, data=before_a_guard_page(prepared.data))


def multiply(be: CompiledBackend, kind: str, n: int, t: int) -> None:
    """Multiply, plainly and as a gate, arrays that all end before a guard page."""
    matrix = matrix_of(be, kind, n)
    bias, x, residual = (before_a_guard_page(np.ones(shape, np.float32)) for shape in ((n,), (t, K), (t, n)))
    assert np.isfinite(be.project_add(x, Linear("w", matrix, bias), residual)).all()
    assert np.isfinite(be.norm_gate_up(x, None, Linear("w", matrix), Linear("w", matrix, bias), "silu")).all()


@pytest.mark.some(2)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", FORMATS)
def test_products_read_nothing_behind_the_last_row(kind: str):
    """In a forked process, which says in shared memory what it multiplies."""
    be, cell = create_backend("simd"), mmap.mmap(-1, 80)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for n, t in itertools.product(ROWS, TOKENS):
                cell[:] = f"{n} rows, {t} tokens".ljust(80).encode()
                multiply(be, kind, n, t)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{cell[:].decode().strip()}: expected exit code 0, found {status}"
