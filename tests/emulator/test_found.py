"""What the emulator has found in published kernels is found in small ones, and not in those that are mended."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kernels.emulator import EmulatorError, emulate, unavailable
from tests.emulator.found import PATTERNS, Pattern, data, outcome

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.some(2)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name.replace(" ", "-"))
def test_the_mistake_is_found_and_the_mended_kernel_is_right(pattern: Pattern):
    expected = pattern.expected(data(pattern).astype(np.float64))
    with emulate() as seen:
        if pattern.caught is None:
            assert not np.allclose(outcome(pattern, mended=False), expected, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(EmulatorError) as caught:
                outcome(pattern, mended=False)
            assert type(caught.value) is pattern.caught, caught.value
            assert re.search(pattern.says, str(caught.value)), caught.value
        seen.findings.clear()
        np.testing.assert_allclose(outcome(pattern, mended=True), expected, rtol=1e-4, atol=1e-4)
        assert not seen.findings


def test_the_page_names_every_pattern():
    page = " ".join((Path(__file__).parents[2] / "docs" / "found.md").read_text().split())
    for pattern in PATTERNS:
        assert f'"{pattern.name}"' in page
