"""Every backend of this machine means the same by every operation."""

import pytest

from tests.contract.cases import CASES, OpCase
from tests.contract.check import BACKENDS, failure


@pytest.mark.some(100)
@pytest.mark.parametrize(("op", "case"), [pytest.param(case.op, case, id=case.id) for case in CASES])
def test_backends_agree_with_the_definition(op: str, case: OpCase):
    """By default some cases of every operation run: `some` reads the operations from the arguments."""
    assert case.op == op
    failures = {name: failure(name, case) for name in BACKENDS}
    assert {name: error for name, error in failures.items() if error is not None} == {}
