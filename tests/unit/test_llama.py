"""Llama's and Qwen2's settings, and how Llama's GGUF files hold what they hold."""

import math
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.parameters import Rope
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.config.rope import Rotation, RotationSetting, llama3
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models import llama
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.stored import TensorLayout
from tests.golden.convert import convert

DATA = Path(__file__).parents[1] / "data"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def rope(**settings: object) -> Rope:
    setting = RotationSetting("rope.freq_base", "rope_theta", 1e4, ("linear", "llama3"), layers=None, always=True)
    return setting.read(Settings(settings, where="here"), "hf", None).for_heads(64)


def test_both_spellings_of_the_rotation_mean_the_same():
    pairs = [
        (rope(rope_theta=5e5), rope(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        (rope(rope_theta=5e5, rope_scaling=LLAMA3), rope(rope_parameters={"rope_theta": 5e5, **LLAMA3})),
        (rope(rope_scaling={"type": "linear", "factor": 2.0}), Rope.plain(64, 1e4, 2.0)),
    ]
    for one, other in pairs:
        assert one.frequencies == other.frequencies


def test_fast_rotations_stay_and_slow_ones_are_slowed_down():
    plain, slowed = rope(rope_theta=5e5), rope(rope_theta=5e5, rope_scaling=LLAMA3)
    for f, g in zip(plain.frequencies, slowed.frequencies, strict=True):
        turns = 8192 * f / (2 * math.pi)
        expected = f if turns > 4 else f / 8 if turns < 1 else None
        assert g == expected or (expected is None and f / 8 < g < f)


def test_between_the_two_the_change_is_gradual():
    """Halfway from 1 turn to 4, half of each."""
    f = 2.5 * 2 * math.pi / 100
    (found,) = llama3(Rotation(1e4, "llama3", factor=4.0, low=1.0, high=4.0, context=100), (f,))
    assert found == pytest.approx(0.5 * f + 0.5 * f / 4)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 2.0},
        {**LLAMA3, "high_freq_factor": 0.5},
        {**LLAMA3, "attention_factor": 2.0},
        {"rope_type": "linear"},
        {"rope_type": "default", "factor": 2.0},
        {"rope_type": "default", "rope_theta": 2e4},
    ],
)
def test_a_scaling_that_is_not_understood_is_refused(scaling: dict[str, object]):
    for settings in ({"rope_scaling": scaling}, {"rope_parameters": scaling}):
        with pytest.raises(UnsupportedConfigError):
            rope(rope_theta=1e4, **settings)


@pytest.mark.parametrize(
    ("naming", "settings", "key"),
    [
        ("gguf", {"block_count": 1, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 2,
                  "attention.key_length": 10**9}, "attention.key_length"),
        ("hf", {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
                "head_dim": 10**9}, "head_dim"),
    ],
)  # fmt: skip
def test_a_damaged_width_is_refused_before_frequencies_are_made(naming, settings, key):
    with pytest.raises(UnsupportedConfigError, match="at most 65,536") as caught:
        llama.Config.read(Settings(settings, where="here"), naming)
    assert caught.value.key == key


def test_loading_counts_the_tensor_that_no_backend_gets(tmp_path: Path):
    convert(DATA / "llama-micro" / "hf", tmp_path / "model.gguf", "F32")
    seen: list[tuple[int, int]] = []
    mlx_engine.load(tmp_path / "model.gguf", "simd", jit=False, progress=lambda *counted: seen.append(counted))
    total = len(open_checkpoint(tmp_path / "model.gguf").shapes)
    assert seen == [(n, total) for n in range(1, total + 1)]


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0"])
def test_dealt_rows_are_put_back_in_order(type_: str):
    values = np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)
    dealt = values.reshape(3, 2, 4, 32).swapaxes(1, 2).reshape(24, 32)
    taken = TensorLayout("w", heads=3).take(Weight.pack("w", dealt, BY_NAME[type_]), (24, 32))
    np.testing.assert_array_equal(taken.dequantize(), Weight.pack("w", values, BY_NAME[type_]).dequantize())
