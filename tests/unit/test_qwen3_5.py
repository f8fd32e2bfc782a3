"""Qwen3.5 and LFM2: forms of folders, the order of rows, settings that are refused, and GGUF files from folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.convert import gguf_form
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import UnsupportedConfigError, UnsupportedTypeError
from mlx_engine.models.qwen3_5 import value_head_order
from mlx_engine.weights.conversion import Conversion
from tests.golden.convert import read_safetensors, write_safetensors
from tests.golden.goldens import DATA

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def folder(name: str) -> Path:
    return DATA / f"{name}-micro" / "hf"


def logits(path: Path) -> np.ndarray:
    return np.asarray(mlx_engine.load(path, "simd").logits(IDS))


def written(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def read(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((folder(name) / "config.json").read_text()), read_safetensors(folder(name) / "model.safetensors")


def test_value_heads_are_dealt_among_the_key_heads():
    assert value_head_order(2, 6) == (0, 3, 1, 4, 2, 5)
    assert value_head_order(3, 3) == (0, 1, 2)


def test_a_published_folder_has_images_and_a_second_head_beside_the_text_model(tmp_path: Path):
    """Names and settings of Qwen3.5-0.8B: vision, several tokens at once, three position ids."""
    text, tensors = read("qwen3_5")
    text |= {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
             "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
             "output_gate_type": "swish", "partial_rotary_factor": 0.25}  # fmt: skip
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
              "tie_word_embeddings": True, "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
              "vision_end_token_id": 4, "vision_config": {"depth": 12}, "transformers_version": "4.57.1"}  # fmt: skip
    renamed = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    unused = {"model.visual.blocks.0.norm1.weight": np.ones(4), "mtp.fc.weight": np.ones((2, 4))}
    path = written(tmp_path / "published", config, {**renamed, **unused})
    np.testing.assert_array_equal(logits(path), logits(folder("qwen3_5")))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_the_form_that_mlx_lm_writes(tmp_path: Path, name: str):
    """Convolutions with the axes in another order; norm weights of Qwen3.5 are not minus 1."""
    config, tensors = read(name)
    made = {}
    for stem, values in tensors.items():
        if values.ndim == 3:
            values = values.swapaxes(1, 2)
        if name == "qwen3_5" and stem.endswith("norm.weight") and "linear_attn" not in stem:
            values = values + np.float32(1)
        made[f"language_model.{stem}" if name == "qwen3_5" else stem] = values
    np.testing.assert_array_equal(logits(written(tmp_path / "mlx", config, made)), logits(folder(name)))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type"),
        ("qwen3_5", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.03}}, "partial_rotary_factor"),
        ("qwen3_5", {"num_experts": 8}, "num_experts"),
        ("qwen3_5", {"num_attention_heads": 2**30, "num_key_value_heads": 1}, "at most 1,048,576 rows"),
        ("qwen3_5", {"linear_num_value_heads": 2**30}, "at most 1,048,576 rows"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [7]}, "full_attn_idxs"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, name: str, change: dict[str, Any], found: str):
    config, tensors = read(name)
    with pytest.raises(UnsupportedConfigError, match=found):
        mlx_engine.load(written(tmp_path / "changed", {**config, **change}, tensors), "simd")


def test_the_ffn_size_of_lfm2_follows_the_rule_of_the_first_llama(tmp_path: Path):
    """Folders of 2025 have `block_ff_dim`, attention layers by index, and their own name for a tied head."""
    config, tensors = read("lfm2")
    for key in ("intermediate_size", "layer_types", "tie_word_embeddings", "rope_parameters"):
        del config[key]
    config |= {"block_ff_dim": 72, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3,
               "block_multiple_of": 64, "full_attn_idxs": [1], "tie_embedding": True, "rope_theta": 1e6, "theta": 1e6,
               "num_heads": 2, "block_dim": 32, "use_pos_enc": True}  # fmt: skip
    np.testing.assert_array_equal(logits(written(tmp_path / "2025", config, tensors)), logits(folder("lfm2")))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_gguf_file_of_a_folder_is_the_same_model(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Its rows are in the order of llama.cpp; the small checkpoints have no tokenizer."""
    monkeypatch.setattr("mlx_engine.convert.gguf_form.to_gguf", lambda *args: {})
    out = tmp_path / "out.gguf"
    requantize(folder(name), out, Conversion("f32"))
    np.testing.assert_array_equal(logits(out), logits(folder(name)))
    assert gguf_form.from_folder(folder(name)).parts


def test_a_block_that_lies_in_two_value_heads_cannot_be_put_in_another_order():
    from mlx_engine.quant import BY_NAME
    from mlx_engine.quant.weight import Weight
    from mlx_engine.weights.stored import TensorLayout

    weight = Weight.pack("w", np.ones((2, 64), np.float32), BY_NAME["Q8_0"])
    with pytest.raises(UnsupportedTypeError, match=r"do not cross groups of 16 columns.*found Q8_0, in blocks of 32"):
        TensorLayout("w", columns=((0, 2, 1, 3), 16)).take(weight, (2, 64))
