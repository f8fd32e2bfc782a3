"""What every test may rely on."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def untouched_log() -> Iterator[None]:
    """Commands configure the log of the whole process; each test finds it as nobody has touched it."""
    logger = logging.getLogger("mlx_engine")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1], before[2]
