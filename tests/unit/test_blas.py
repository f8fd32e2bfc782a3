"""The limit on BLAS's threads belongs to the process: overlapping sessions agree on it."""

from contextlib import ExitStack

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from mlx_engine.backends.numpy.simd import SimdBackend, one_blas_thread


def blas_threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def three_threads():
    if not blas_threads():
        pytest.skip("this NumPy has no BLAS whose threads can be counted")
    with threadpool_limits(3, user_api="blas"):
        yield


def test_a_session_holds_blas_to_one_thread_and_gives_it_back():
    with SimdBackend().session():
        assert blas_threads() == {1}
    assert blas_threads() == {3}


def test_overlapping_sessions_hold_the_limit_until_the_last_has_ended():
    first, second = ExitStack(), ExitStack()
    first.enter_context(one_blas_thread())
    second.enter_context(one_blas_thread())
    first.close()
    assert blas_threads() == {1}
    second.close()
    assert blas_threads() == {3}


def test_a_session_that_fails_gives_the_threads_back():
    with pytest.raises(RuntimeError), one_blas_thread():
        raise RuntimeError
    assert blas_threads() == {3}
