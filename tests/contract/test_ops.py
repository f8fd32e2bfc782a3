"""Every backend of this machine means the same by every operation."""

import pytest

from tests.contract.cases import CASES, OpCase
from tests.contract.check import BACKENDS, failure


@pytest.mark.some(100)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backends_agree_with_the_definition(case: OpCase):
    failures = {name: failure(name, case) for name in BACKENDS}
    assert {name: error for name, error in failures.items() if error is not None} == {}
