"""Layers of multi-token prediction are left out, wherever files have them."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import TensorMismatchError, UnsupportedConfigError
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import architecture_of
from mlx_engine.weights.plan import check
from tests.random_models import random_checkpoint

EXTRA = "model.layers.2.eh_proj.weight", "model.mtp.0.norm.weight"


def with_more(of: Checkpoint, settings: dict[str, object], *names: str) -> Checkpoint:
    more = {name: Weight.pack(name, np.ones(4, np.float32), F32) for name in names}
    shapes = {**of.shapes, **{name: weight.shape for name, weight in more.items()}}
    read = of.weight
    return Checkpoint(
        of.where, of.naming, of.architecture, {**of.settings, **settings}, of.metadata, shapes,
        lambda name: more.get(name) or read(name),
    )  # fmt: skip


def test_a_folder_s_layers_after_its_own_are_left_out_if_the_config_has_them():
    of = random_checkpoint("mistral", "F32")
    found = with_more(of, {"num_nextn_predict_layers": 1}, *EXTRA)
    assert len(check(found, architecture_of(found).plan(found))) == len(of.shapes)
    with pytest.raises(TensorMismatchError, match=r"layers\.2\.eh_proj"):
        check(with_more(of, {}, *EXTRA), architecture_of(of).plan(of))


def test_a_gguf_file_counts_them_among_its_blocks():
    found = with_more(
        random_checkpoint("qwen3", "F32"), {"block_count": 3, "nextn_predict_layers": 1}, "blk.2.nextn.eh_proj.weight"
    )
    plan = architecture_of(found).plan(found)
    assert plan.config.n_layers == 2
    check(found, plan)
    wrong = with_more(found, {"nextn_predict_layers": 3})
    with pytest.raises(UnsupportedConfigError, match="fewer than all 3 layers"):
        architecture_of(wrong).plan(wrong)
