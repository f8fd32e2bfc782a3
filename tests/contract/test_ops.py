"""Every backend of this machine means the same by every operation."""

import pytest

from tests.contract.cases import CASES, OpCase
from tests.contract.check import BACKENDS, backend, check


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backend_agrees_with_the_definition(name: str, case: OpCase):
    check(backend(name), case)
