"""`mlx` writes keys and values where they lie: a write or a copied page does not copy the store."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.backends.mlx.backend import MlxBackend


@pytest.fixture(scope="module")
def be() -> MlxBackend:
    return MlxBackend()


def address(be: MlxBackend, x: mx.array) -> int:
    """Where an array lies. Nothing that would keep its memory from being written again is left behind."""
    return int(be.host(x).ctypes.data)


@pytest.mark.parametrize("apart", [1, 7])
def test_a_store_is_written_in_place(be: MlxBackend, apart: int):
    """A copy of everything for every token would lie elsewhere than what it is a copy of."""
    with be.session():
        store = be.kv_empty(4, 64, 1000)
        new = [be.array(np.full((2, 4, 64), value)) for value in (1, 2)]
        be.wait([store, *new])
        for at in range(0, 40, 4):
            before = address(be, store)
            store = be.kv_write(store, np.array([at, at + apart]), *new)
            assert address(be, store) == before
    found, written = be.host(store), [slot for at in range(0, 40, 4) for slot in (at, at + apart)]
    np.testing.assert_array_equal(np.delete(found, written, axis=2), 0)
    assert (found[0][:, written] == 1).all()
    assert (found[1][:, written] == 2).all()


def test_a_page_is_copied_in_place(be: MlxBackend):
    store = be.kv_empty(4, 64, 1000)
    rows = be.array(np.arange(40, dtype=np.float32)[:, None, None] * np.ones((40, 4, 64), dtype=np.float32))
    store = be.kv_write(store, np.arange(40), rows, rows)
    be.wait(store)
    before = address(be, store)
    for target in (100, 200, 300):  # outside of a session, and without waiting in between
        store = be.kv_copy(store, 3, target, 33)
    be.wait(store)
    assert address(be, store) == before
    found = be.host(store)
    for target in (100, 200, 300):
        np.testing.assert_array_equal(found[:, :, target : target + 33], found[:, :, 3:36])
    assert not found[:, :, 333:].any()
    np.testing.assert_array_equal(found[0, 0, :40, 0], np.arange(40))
