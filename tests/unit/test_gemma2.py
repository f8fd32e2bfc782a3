"""Gemma 2's settings as published, in both kinds of files, and what is refused."""

import json

import numpy as np
import pytest

import mlx_engine
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models.gemma2 import Config
from tests.golden.goldens import DATA

FOLDER = DATA / "gemma2-micro" / "hf"
CONFIG = json.loads((FOLDER / "config.json").read_text())
# The published settings of the 27B model.
LARGEST = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.02,
    "intermediate_size": 36_864, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
    "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0, "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256_000,
    "_attn_implementation": "eager",
}  # fmt: skip
GGUF_2B = {
    "block_count": 26, "context_length": 8192, "embedding_length": 2304, "feed_forward_length": 9216,
    "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
    "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


def hf(**changed: object) -> Config:
    return Config.read(Settings({**LARGEST, **changed}, where="here"), "hf")


def gguf(**changed: object) -> Config:
    named = {key.replace("__", "."): value for key, value in changed.items()}
    return Config.read(Settings({**GGUF_2B, **named}, where="here"), "gguf", 256_000)


def test_the_published_settings():
    config = hf()
    assert (config.score_softcap, config.logit_softcap, config.window) == (50.0, 30.0, 4096)
    assert config.attention_scale == 1 / 12
    assert config.windows[:4] == (4096, None, 4096, None)


def test_an_almost_empty_config_is_the_2b_model():
    config = Config.read(Settings({"model_type": "gemma2"}, where="here"), "hf")
    assert config == gguf()
    assert config.attention_scale == 1 / 16


def test_gguf_of_the_27b_model():
    sizes = {"block_count": 46, "embedding_length": 4608, "attention__head_count": 32, "attention__key_length": 128}
    config = gguf(**sizes, attention__value_length=128, attention__head_count_kv=16, feed_forward_length=36_864)
    assert config == hf()


def test_null_is_no_soft_cap_and_gguf_cannot_say_so():
    config = hf(attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.score_softcap, config.logit_softcap) == (None, None)
    keys = config.to_gguf()
    assert not any("softcapping" in key for key in keys)
    again = Config.read(Settings(keys, where="here"), "gguf", 256_000)
    assert config.differences(again) == ["score_softcap", "logit_softcap"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", -1.0),
        ("final_logit_softcapping", "30"),
        ("hidden_activation", "gelu"),
        ("attention_bias", True),
        ("use_bidirectional_attention", True),
        ("tie_word_embeddings", False),
        ("sliding_window_pattern", 6),
        ("layer_types", ["full_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("something_new", 1),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(key: str, value: object):
    with pytest.raises(UnsupportedConfigError) as caught:
        hf(**{key: value})
    assert caught.value.key in (key, "rope_type")


def test_soft_caps_and_windows_reach_the_layers():
    model = mlx_engine.load(FOLDER, "simd").model
    assert [(w.mix.window, w.mix.scores.scale, w.mix.scores.softcap) for w in model.layers] == [  # type: ignore[attr-defined]
        (8, 0.5, 5.0),
        (None, 0.5, 5.0),
        (8, 0.5, 5.0),
    ]


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_without_a_soft_cap_logits_differ(key: str, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: None}))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / "model.safetensors")
    ids = list(range(5, 25))
    found, capped = (np.asarray(mlx_engine.load(path, "simd").logits(ids)) for path in (tmp_path, FOLDER))
    assert np.abs(found - capped).max() > 0.1
    assert np.abs(capped).max() < 12
