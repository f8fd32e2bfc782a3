"""The memory that MLX's ring does not use is given back; other memory stays."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from mlx_engine.distributed.group import RING_BUFFERS as SIZE
from mlx_engine.distributed.group import released

PAGE = mmap.PAGESIZE
ADDRESS = ctypes.c_void_p
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux only")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def mapped(nbytes: int, fill: int = 0) -> mmap.mmap:
    """Return private memory between two pages without access, so that the system joins it with no other memory."""
    memory = mmap.mmap(-1, nbytes + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    first = ctypes.addressof(view)
    ctypes.memset(first + PAGE, 0, nbytes)
    view[nbytes] = bytes([fill])
    for at in (first, first + PAGE + nbytes):
        assert ctypes.CDLL(None).mprotect(ADDRESS(at), ctypes.c_size_t(PAGE), 0) == 0
    return memory


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("nbytes", "fill", "n_mappings", "expected"),
    [
        (SIZE + PAGE, 0, 1, 0),
        (SIZE + PAGE, 1, 1, 1),
        (SIZE + 2 * PAGE, 0, 1, 1),
        (SIZE + PAGE, 0, 2, 2),
    ],
)
def test_zeros_of_the_size_of_the_buffers_are_given_back(nbytes: int, fill: int, n_mappings: int, expected: int):
    before = resident()
    with released():
        memory = [mapped(nbytes, fill) for _ in range(n_mappings)]
        assert resident() - before >= n_mappings * SIZE
    assert (resident() - before + SIZE // 2) // SIZE == expected
    assert all(of[nbytes] == fill for of in memory)
