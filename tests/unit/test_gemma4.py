"""Gemma 4's settings: which layers share, the sizes of layers, and what is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine
from mlx_engine.bench.work import sizes
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.config.settings import Settings
from mlx_engine.convert.requantize import requantize
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models import gemma4
from mlx_engine.models.gemma4 import flat
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from tests.golden.goldens import DATA
from tests.golden.test_dense import with_tokenizer

FOLDER = DATA / "gemma4e-micro" / "hf"
ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
# The sizes of E2B, as its config.json has them.
E2B: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536, "intermediate_size": 6144,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "rope_parameters": ROPES,
}  # fmt: skip


MIXTURE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}


def read(**changes: object) -> gemma4.Config:
    return gemma4.read(Settings({**E2B, **changes}, where="here"))


def test_sizes_of_layers():
    config = read()
    assert [config.shares(i) for i in (0, 14, 15, 18, 19, 34)] == [None, None, 13, 13, 14, 14]
    sizes = [(of.head_dim, of.intermediate_size) for of in map(config.of_layer, (0, 4, 15, 34))]
    assert sizes == [(256, 6144), (512, 6144), (256, 12288), (512, 12288)]
    frequencies = config.rope.for_heads(512).frequencies
    assert len(frequencies) == 256
    assert frequencies[:64] == pytest.approx([1e6 ** (-2 * j / 512) for j in range(64)])
    assert not any(frequencies[64:])


def test_global_layers_have_their_own_kv_heads_only_where_values_are_keys():
    """As in transformers, which ignores the key otherwise."""
    assert read(num_global_key_value_heads=2).of_layer(4).n_kv_heads == 1
    config = read(num_global_key_value_heads=2, attention_k_eq_v=True)
    assert (config.of_layer(4).n_kv_heads, config.of_layer(0).n_kv_heads) == (2, 1)


def test_sizes_of_layers_as_transformers_5_writes_them():
    layers = {str(i): {"head_dim": 128, "num_key_value_heads": 4} for i in range(4, 35, 5)}
    assert read(per_layer_config=layers).of_layer(9).head_dim == 128
    assert read(per_layer_config=layers).of_layer(9).n_kv_heads == 4
    with pytest.raises(UnsupportedConfigError, match="per_layer_config"):
        read(per_layer_config={**layers, "0": {"head_dim": 128}})
    with pytest.raises(UnsupportedConfigError, match="sliding_window"):
        read(per_layer_config={**layers, "4": {"sliding_window": 3}})


def test_the_last_layer_is_global():
    assert read(layer_types=["sliding_attention", "full_attention"] * 17 + ["sliding_attention"]).windows[-1] is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"enable_moe_block": True}, "num_experts"),
        ({**MIXTURE, "top_k_experts": None}, "top_k_experts"),
        ({**MIXTURE, "top_k_experts": 9}, "at most the number of experts, 8"),
        ({**MIXTURE, "num_experts": 10**6}, "at most 2,857"),
        ({**MIXTURE, "enable_moe_block": 1}, "enable_moe_block"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, "rope_parameters"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({"global_head_dim": 33}, "global_head_dim"),
    ],
)
def test_settings_that_are_not_implemented(changes: dict[str, object], key: str):
    with pytest.raises(UnsupportedConfigError, match=key):
        read(**changes)


def test_a_model_with_images_and_sounds_is_read_as_text(tmp_path: Path):
    """The text model's tensors have another stem; other models' tensors and shared projections are not read."""
    text = json.loads((FOLDER / "config.json").read_text())
    around = {"model_type": "gemma4", "text_config": text, "vision_config": {"hidden_size": 4}, "audio_config": None}
    (tmp_path / "config.json").write_text(json.dumps({**around, "image_token_id": 60, "boi_token_id": 61}))
    raw = mlx_engine.load(FOLDER, "simd")
    assert raw.config.n_shared == 2
    weights: Any = mx.load(str(FOLDER / "model.safetensors"))
    made = {name.replace("model.", "model.language_model.", 1): values for name, values in weights.items()}
    made["model.vision_tower.patch.weight"] = made["model.embed_audio.x.weight"] = mx.zeros((2, 2))
    made["model.language_model.layers.4.self_attn.k_proj.weight"] = mx.zeros((16, 32))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), made)
    ids = [1, 2, 3, 4, 5]
    found = mlx_engine.load(tmp_path, "simd").logits(ids)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(raw.logits(ids)))


def test_sizes_of_experts_have_no_meaning_without_them():
    """config.json of models without experts has them too; GGUF files do not."""
    config = read(num_experts=None, top_k_experts=8, moe_intermediate_size=704)
    assert (config.n_experts, config.n_experts_used, config.expert_size) == (0, 0, 0)
    assert not any("expert" in key for key in config.to_gguf())
    config = read(**MIXTURE)
    assert (config.n_experts, config.n_experts_used, config.expert_size) == (8, 2, 704)
    keys = {key: value for key, value in config.to_gguf().items() if "expert" in key}
    assert keys == {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 704}


@pytest.mark.slow
def test_a_gguf_file_with_gate_and_up_in_one_tensor(tmp_path: Path):
    """llama.cpp's converter writes experts so, as published folders have them."""
    folder = DATA / "gemma4moe-micro" / "hf"
    apart, fused, ids = tmp_path / "apart.gguf", tmp_path / "fused.gguf", [1, 2, 3, 4, 5]
    requantize(with_tokenizer(folder, tmp_path / "hf"), apart, Conversion("f32"))
    with open_gguf(apart) as file:
        tensors = {name: file.weight(name) for name in file.tensors}
        for i in range(3):
            halves = [tensors.pop(f"blk.{i}.ffn_{part}_exps.weight").dequantize() for part in ("gate", "up")]
            name = f"blk.{i}.ffn_gate_up_exps.weight"
            tensors[name] = Weight.pack(name, np.concatenate(halves, axis=1), F32)
        write_gguf(fused, file.typed_metadata(), tensors.values())
    want = np.asarray(mlx_engine.load(folder, "simd").logits(ids))
    for path in (apart, fused):
        np.testing.assert_array_equal(np.asarray(mlx_engine.load(path, "simd").logits(ids)), want)
        requantize(path, path.with_suffix(".q8.gguf"), Conversion("q8_0"))
    quantized = [
        np.asarray(mlx_engine.load(path.with_suffix(".q8.gguf"), "simd").logits(ids)) for path in (apart, fused)
    ]
    np.testing.assert_array_equal(*quantized)
    assert not np.array_equal(quantized[0], want)
    with open_gguf(fused.with_suffix(".q8.gguf")) as file:
        assert file.weight("blk.0.ffn_gate_up_exps.weight").type.name == "Q8_0"


def test_sizes_that_forecasts_read():
    """The second table is looked up and not multiplied; attention of layers that share keys and values reads them."""
    found = sizes(open_checkpoint(FOLDER), lambda type_: 2.0)
    assert found.cached == 3 * 2 * (16 + 32) * 4
    assert found.scored == 3 * 2 * 4 * (16 + 32)
    local, everywhere = (2 * 64 * 32 + 2 * 16 * 32, 2 * 128 * 32 + 2 * 32 * 32)
    ffn, inputs = 3 * 64 * 32, 2 * 32 * 32
    shared = 2 * 64 * 32 + 2 * 128 * 32 + 4 * ffn
    assert found.layers == 2 * (local + everywhere) + 4 * ffn + shared + 6 * inputs + 6 * 32 * 32


GGUF: dict[str, Any] = {
    "block_count": 4, "embedding_length": 64, "feed_forward_length": [32, 32, 64, 64], "attention.head_count": 4,
    "attention.head_count_kv": [2, 1, 2, 1], "attention.key_length": 32, "attention.value_length": 32,
    "attention.key_length_swa": 16, "attention.value_length_swa": 16, "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16, "context_length": 100, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 16,
}  # fmt: skip


def read_gguf(shapes: tuple[str, ...] = ("blk.1.attn_v.weight",), **changes: object) -> gemma4.Config:
    settings = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    file = SimpleNamespace(settings=settings, where="here", shapes=dict.fromkeys(shapes, (1,)))
    return gemma4.read(flat(cast(Any, file)), "gguf", 10)


def test_gguf_keys():
    config = read_gguf()
    assert [of.n_kv_heads for of in map(config.of_layer, range(4))] == [2, 1, 2, 1]
    assert [of.intermediate_size for of in map(config.of_layer, range(4))] == [32, 32, 64, 64]
    assert (config.logit_softcap, config.k_is_v, read_gguf(()).k_is_v) == (30.0, False, True)
    keys = config.to_gguf()
    assert {key: keys[key] for key in GGUF} == GGUF


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_length", [32, 64, 64, 64]),
        ("feed_forward_length", [32, 32, 64]),
        ("attention__head_count_kv", [2, 1, 1, 1]),
        ("attention__head_count_kv", [2, 0, 2, 1]),
        ("attention__sliding_window_pattern", 2),
        ("attention__shared_kv_layers", 4),
        ("attention__value_length", 16),
        ("rope__dimension_count", 16),
        ("block_count", 100_000),
        ("expert_count", 8),  # without the other sizes of experts
        ("expert_used_count", 8),
        ("expert_count", 10**6),
    ],
)
def test_gguf_keys_that_are_not_implemented(key: str, value: object):
    with pytest.raises(UnsupportedConfigError, match="expert" if "expert" in key else key.replace("__", ".")):
        read_gguf(**{key: value})
