"""Mistral's settings: the window in its three spellings, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mlx_engine
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models import mistral
from tests.golden.goldens import DATA
from tests.published import PUBLISHED

MISTRAL_7B_01 = PUBLISHED["mistralai/Mistral-7B-v0.1"]["config"]
MISTRAL_NEMO = PUBLISHED["mistralai/Mistral-Nemo-Base-2407"]["config"]


def plan(**changed: Any) -> Any:
    settings = {key: value for key, value in {**MISTRAL_7B_01, **changed}.items() if value != "absent"}
    return mistral.plan(Checkpoint("here", "hf", "mistral", settings, {}, {}, lambda name: pytest.fail(name)))


def test_the_window_is_a_number_null_or_left_to_transformers():
    assert plan(sliding_window=7).config.window == 7
    assert plan(sliding_window=None).config.window is None
    assert plan(sliding_window="absent").config.window == 4096
    assert plan(**MISTRAL_NEMO).config.window is None


@pytest.mark.parametrize("window", [None, 7])
def test_every_layer_has_the_window(tmp_path: Path, window: int | None):
    folder = shutil.copytree(DATA / "mistral-micro" / "hf", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    model: Any = mlx_engine.load(folder, "simd", jit=False).model
    assert [layer.mix.window for layer in model.layers] == [window] * 3


def test_a_head_width_may_be_null():
    assert plan(head_dim=None).config.head_dim == 128
    assert plan(head_dim=96).config.head_dim == 96


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", 0), ("sliding_window", True), ("hidden_act", "gelu"), ("attention_bias", True),
     ("layer_types", ["full_attention"] * 32), ("head_dim", 127), ("something_new", 1)],
    ids=str,
)  # fmt: skip
def test_a_setting_that_would_change_the_computation_is_refused_by_name(key: str, value: object):
    with pytest.raises(UnsupportedConfigError) as caught:
        plan(**{key: value})
    assert caught.value.key == key
