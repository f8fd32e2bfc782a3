"""The tests of the emulator run kernels as users do, with optimised code."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_do(optimized_kernels: None) -> None:
    """Apply the fixture to every module of this folder."""
