"""Values of files that are not finite: `inspect --verify` reads all tensors, piece by piece."""

import numpy as np
import pytest

from mlx_engine.convert.verify import verify
from mlx_engine.quant import readable_types
from mlx_engine.quant.group_weight import GroupWeight, split
from mlx_engine.quant.groups import GROUP_TYPES
from mlx_engine.quant.statistics import not_finite
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.random_blocks import random_groups
from tests.scheduling import MICRO


def test_the_file_is_read_with_progress():
    calls = []
    findings = verify(MICRO, progress=lambda *of: calls.append(of))
    (values,) = [finding.detail for finding in findings if finding.check == "values"]
    n = calls[-1][1]
    assert calls == [(i, n) for i in range(1, n + 1)]
    assert values == f"the values of all {n:,} tensors are finite"


def test_tensors_of_unreadable_types_do_not_count_as_finite(monkeypatch):
    monkeypatch.setattr("mlx_engine.convert.verify.readable_types", lambda: [BY_NAME["Q8_0"]])
    (values,) = [finding.detail for finding in verify(MICRO) if finding.check == "values"]
    assert values == "the values of 22 of 35 tensors are finite"


@pytest.mark.parametrize("type_name", [type_.name for type_ in readable_types()])
def test_a_bad_scale_is_found_in_every_type(type_name):
    """A block of ones in its bits has a scale that is NaN, if the type has such scales."""
    type_ = BY_NAME[type_name]
    n = (1 << 16) // type_.block_size + 3  # the last blocks are in a second piece
    data = np.zeros((n, type_.block_bytes), np.uint8)
    sound = Weight("w", (n, type_.block_size), type_, data.reshape(-1).copy())
    data[n - 2] = 0xFF
    if type_name in ("Q6_K", "Q3_K", "TQ1_0", "TQ2_0", "Q2_K"):
        data[n - 2, 4:-4] = 0  # the quants and the scales of the parts are 0: infinity times 0 is NaN
    bad = Weight("w", (n, type_.block_size), type_, data.reshape(-1))
    assert not_finite(sound) is None
    found = not_finite(bad)
    if type_name == "NVFP4":  # all bits of its scales are numbers
        assert found is None
        return
    assert found is not None
    assert found.first == (n - 2) * type_.block_size
    assert found.count == int((~np.isfinite(bad.dequantize())).sum()) > 0


def test_groups_of_mlx_are_read_in_pieces():
    """The blocks of a whole matrix are not made: they would take as much memory as the file."""
    type_ = next(of for of in GROUP_TYPES if (of.mode, of.bits, of.block_size, of.scale) == ("affine", 4, 64, "F16"))
    blocks = random_groups(np.random.default_rng(0), "w", type_.name, 1100, 128)
    parts = split(blocks, type_)
    parts.scales[1500] = 0xFF
    weight = GroupWeight("w", (1100, 128), type_, parts)
    found = not_finite(weight)
    assert "data" not in vars(weight)
    assert found is not None
    assert (found.count, found.first) == (64, 1500 * 64)
