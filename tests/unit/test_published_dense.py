"""config.json of SmolLM3, Phi-3 and 4, Ministral 3, Granite and OLMo as their repositories publish it."""

from typing import Any

import pytest

from mlx_engine.errors import UnsupportedConfigError
from tests.published import PUBLISHED
from tests.unit.test_published_settings import plan

MISTRAL_7B_01 = PUBLISHED["mistralai/Mistral-7B-v0.1"]["config"]
QWEN25_05B = PUBLISHED["Qwen/Qwen2.5-0.5B"]["config"]

COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
SMOLLM3_3B = {
    **COMMON, "architectures": ["SmolLM3ForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128012,
    "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
    "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "transformers_version": "4.54.0.dev0", "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
PHI3_MINI_4K = {
    **COMMON, "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "transformers_version": "4.40.2", "vocab_size": 32064,
}  # fmt: skip
PHI4_MINI = {
    **PHI3_MINI_4K, "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1,
    "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
    "rope_scaling": {"long_factor": [1.0, 1.25] * 24, "short_factor": [1.0] * 48, "type": "longrope"},
    "vocab_size": 200064,
}  # fmt: skip
MINISTRAL3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "vision_feature_layer": -1, "vision_config": {"model_type": "pixtral"},
    "transformers_version": "5.0.0.dev0",
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
    },
}  # fmt: skip
GRANITE33_2B = {
    **COMMON, "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.015625, "bos_token_id": 0,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 2048, "intermediate_size": 8192,
    "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "transformers_version": "4.49.0", "vocab_size": 49159,
}  # fmt: skip
GRANITE4_MICRO = {
    **GRANITE33_2B, "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 2560, "init_method": "mup",
    "intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0, "num_local_experts": 0,
    "output_router_logits": False, "position_embedding_type": "rope", "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192, "vocab_size": 100352,
}  # fmt: skip
del GRANITE4_MICRO["mlp_bias"]
OLMO2_7B = {
    **COMMON, "architectures": ["Olmo2ForCausalLM"], "eos_token_id": 100257, "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
OLMO3_7B = {
    **OLMO2_7B, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "sliding_window": 4096, "vocab_size": 100278,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN25_YARN = {**QWEN25_05B, "rope_scaling": YARN}
MISTRAL_YARN = {**MISTRAL_7B_01, "rope_scaling": {**YARN, "finetuned": True}}
# Layers, width, query heads, key/value heads, head width, vocabulary, context; the rule of the rotation.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "SmolLM3-3B": (SMOLLM3_3B, (36, 2048, 16, 4, 128, 128256, 65536), "default"),
    "Phi-3-mini-4k": (PHI3_MINI_4K, (32, 3072, 32, 32, 96, 32064, 4096), "default"),
    "Phi-4-mini": (PHI4_MINI, (32, 3072, 24, 8, 128, 200064, 131072), "longrope"),
    "Ministral-3-8B": (MINISTRAL3_8B, (34, 4096, 32, 8, 128, 131072, 262144), "yarn"),
    "Granite-3.3-2B": (GRANITE33_2B, (40, 2048, 32, 8, 64, 49159, 131072), "default"),
    "Granite-4.0-micro": (GRANITE4_MICRO, (40, 2560, 40, 8, 64, 100352, 131072), "default"),
    "OLMo-2-7B": (OLMO2_7B, (32, 4096, 32, 32, 128, 100352, 4096), "default"),
    "Olmo-3-7B": (OLMO3_7B, (32, 4096, 32, 32, 128, 100278, 65536), "yarn"),
    "Qwen2.5, YaRN": (QWEN25_YARN, (24, 896, 14, 2, 64, 151936, 32768), "yarn"),
    "Mistral, YaRN": (MISTRAL_YARN, (32, 4096, 32, 8, 128, 32000, 32768), "yarn"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_as_published(name: str):
    settings, sizes, rule = PUBLISHED[name]
    found = plan(settings).config
    assert sizes == (
        found.n_layers, found.hidden_size, found.n_heads, found.n_kv_heads, found.head_dim, found.vocab_size,
        found.context_length,
    )  # fmt: skip
    assert found.rope.rule == rule
    assert len(found.rope.for_heads(found.head_dim).frequencies) == found.head_dim // 2


def test_what_is_special_about_each():
    assert plan(SMOLLM3_3B).config.has_rope == (True, True, True, False) * 9
    assert plan(PHI4_MINI).config.rotary_dim == 96
    assert plan(PHI4_MINI).config.rope.attention_factor == pytest.approx(1.1902380714238083)
    assert plan(MINISTRAL3_8B).config.rope.for_heads(128).growth == (0.1, 16384)
    assert plan(MINISTRAL3_8B).config.rope.attention_factor == 1
    assert plan(OLMO3_7B).config.windows[:5] == (4096, 4096, 4096, None, 4096)
    assert plan(OLMO3_7B).config.local_rope.rule == "default"
    assert plan(OLMO2_7B).config.windows == (None,) * 32


@pytest.mark.parametrize(
    ("settings", "changed", "key"),
    [
        (SMOLLM3_3B, {"use_sliding_window": True}, "use_sliding_window"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 2] * 18}, "no_rope_layers"),
        (PHI4_MINI, {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "long_factor": [1.0] * 47}}, "long_factor"),
        (PHI4_MINI, {"rope_scaling": {**PHI4_MINI["rope_scaling"], "short_factor": [0.0] * 48}}, "0"),
        (MINISTRAL3_8B, {"something_new": 1}, "something_new"),
        (GRANITE4_MICRO, {"position_embedding_type": "nope"}, "position_embedding_type"),
        (GRANITE4_MICRO, {"position_embedding_type": None}, "position_embedding_type"),
        (GRANITE4_MICRO, {"layer_types": ["mamba"] * 40}, "layer_types"),
        (GRANITE4_MICRO, {"num_local_experts": 8}, "num_local_experts"),
        (OLMO2_7B, {"sliding_window": 4096}, "sliding_window"),
        (OLMO3_7B, {"rope_scaling": {**OLMO3_7B["rope_scaling"], "invented": 1}}, "invented"),
        (QWEN25_05B, {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "type"),
        (QWEN25_05B, {"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta"),
    ],
)
def test_a_setting_that_would_change_the_computation_is_refused_by_name(
    settings: dict[str, Any], changed: dict[str, Any], key: str
):
    with pytest.raises(UnsupportedConfigError) as caught:
        plan({**settings, **changed})
    assert caught.value.key == key
