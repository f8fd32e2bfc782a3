from collections.abc import Iterator

import pytest

from tests.serve.served import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server that tests share; none of them may hold its steps or end it."""
    with served() as found:
        yield found
