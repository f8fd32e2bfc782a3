"""config.json as well-known repositories publish it: every key is understood, or known to change nothing."""

from typing import Any

import pytest

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.models import model_file

GPT2_MEDIUM = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24,
    "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
DISTILGPT2 = {
    **{key: value for key, value in GPT2_MEDIUM.items() if key not in ("n_special", "predict_special_tokens")},
    "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_embd": 768, "n_head": 12,
    "n_layer": 6,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B_01 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_NEMO = {
    **MISTRAL_7B_01, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40,
    "max_position_embeddings": 1024000, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
# Layers, width, query heads, key/value heads, head width, vocabulary, context.
SIZES = {
    "gpt2-medium": (GPT2_MEDIUM, (24, 1024, 16, 16, 64, 50257, 1024)),
    "distilgpt2": (DISTILGPT2, (6, 768, 12, 12, 64, 50257, 1024)),
    "gemma-3-1b": (GEMMA3_1B, (26, 1152, 4, 1, 256, 262144, 32768)),
    "gemma-3-4b": (GEMMA3_4B, (34, 2560, 8, 4, 256, 262208, 131072)),
    "Qwen2.5-0.5B": (QWEN25_05B, (24, 896, 14, 2, 64, 151936, 32768)),
    "SmolLM2-135M": (SMOLLM2_135M, (30, 576, 9, 3, 64, 49152, 8192)),
    "Llama-3.2-1B": (LLAMA32_1B, (16, 2048, 32, 8, 64, 128256, 131072)),
    "Mistral-7B-v0.1": (MISTRAL_7B_01, (32, 4096, 32, 8, 128, 32000, 32768)),
    "Mistral-Nemo": (MISTRAL_NEMO, (40, 5120, 32, 8, 128, 131072, 1024000)),
}


def plan(config: dict[str, Any]) -> Any:
    checkpoint = Checkpoint(
        where="here",
        naming="hf",
        architecture=config["model_type"],
        settings=config,
        metadata={},
        shapes={},
        weight=lambda name: pytest.fail(f"{name} was read"),
    )
    return model_file(checkpoint).plan(checkpoint)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_as_published(name: str):
    config, sizes = SIZES[name]
    found = plan(config).config
    assert sizes == (
        found.n_layers, found.hidden_size, found.n_heads, found.n_kv_heads, found.head_dim, found.vocab_size,
        found.context_length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key"),
    [(SMOLLM2_135M, "rope_interleaved"), (QWEN25_05B, "use_mrope"), (QWEN25_05B, "use_sliding_window")],
)
def test_a_switch_that_is_off_when_published_is_refused_when_on(config: dict[str, Any], key: str):
    with pytest.raises(UnsupportedConfigError, match=key):
        plan({**config, key: True})
