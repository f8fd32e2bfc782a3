"""Make the checkpoints of more dense architectures in tests/data and their golden files. The tests never run this.

Tiny models with random weights, stored in bfloat16, whose windows and training contexts are much shorter than the
prompts. Computed as in `make_llama_goldens.py`, in float64; `_q8` is for matrices after a round trip through Q8_0. Also
the frequencies of every scaling rule of rotary embedding, for settings as repositories publish them.

    python -m tests.golden.make_dense_goldens          # all
    python -m tests.golden.make_dense_goldens phi3     # some
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers import modeling_rope_utils as rope_utils
from transformers.models.afmoe import modeling_afmoe
from transformers.models.arcee import modeling_arcee
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.cwm import modeling_cwm
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.dots1 import modeling_dots1
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe
from transformers.models.exaone4 import modeling_exaone4
from transformers.models.exaone_moe import modeling_exaone_moe
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm import modeling_glm
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.gpt_bigcode import modeling_gpt_bigcode
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.granite import modeling_granite
from transformers.models.granitemoe import modeling_granitemoe
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.helium import modeling_helium
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense
from transformers.models.hunyuan_v1_moe import modeling_hunyuan_v1_moe
from transformers.models.jais2 import modeling_jais2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.mellum import modeling_mellum
from transformers.models.minicpm3 import modeling_minicpm3
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.mistral4 import modeling_mistral4
from transformers.models.nanochat import modeling_nanochat
from transformers.models.nemotron import modeling_nemotron
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo import modeling_olmo
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.olmoe import modeling_olmoe
from transformers.models.phi import modeling_phi
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.seed_oss import modeling_seed_oss
from transformers.models.smollm3 import modeling_smollm3
from transformers.models.solar_open import modeling_solar_open
from transformers.models.stablelm import modeling_stablelm
from transformers.models.starcoder2 import modeling_starcoder2
from transformers.models.vaultgemma import modeling_vaultgemma
from transformers.models.youtu import modeling_youtu

from tests.golden.make_goldens import DATA, DoubleTorch, greedy, logits_of
from tests.golden.make_llama_goldens import clear_choices, to_q8_0

MODULES = (
    modeling_jais2,
    modeling_afmoe, modeling_dots1, modeling_exaone_moe, modeling_solar_open,
    modeling_llama4, modeling_minicpm3, modeling_mistral4, modeling_youtu,
    modeling_deepseek_v2, modeling_deepseek_v3, modeling_glm4_moe_lite,
    modeling_ernie4_5_moe, modeling_granitemoe, modeling_hunyuan_v1_moe, modeling_lfm2_moe, modeling_qwen3_next,
    modeling_falcon_h1, modeling_mamba2, modeling_nemotron_h,
    modeling_minimax_m2,
    modeling_glm4_moe,
    modeling_olmoe,
    modeling_arcee,
    rope_utils, modeling_cohere2, modeling_ernie4_5, modeling_exaone4, modeling_glm4, modeling_hunyuan_v1_dense,
    modeling_llama, modeling_nanochat, modeling_seed_oss, modeling_starcoder2, modeling_gemma4, modeling_granite,
    modeling_granitemoehybrid, modeling_ministral3, modeling_olmo2, modeling_olmo3, modeling_phi3, modeling_smollm3,
    modeling_cohere, modeling_qwen2,
    modeling_glm,
    modeling_helium,
    modeling_nemotron,
    modeling_gemma,
    modeling_stablelm,
    modeling_phi,
    modeling_gpt_neox,
    modeling_gpt_bigcode,
    modeling_olmo,
    modeling_mellum,
    modeling_cwm,
    modeling_vaultgemma,
)  # fmt: skip
# transformers has it as a part of Mistral 3 alone.
AutoModelForCausalLM.register(modeling_mistral4.Mistral4Config, modeling_mistral4.Mistral4ForCausalLM, exist_ok=True)
VOCAB = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "attn_implementation": "eager", "tie_word_embeddings": True,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.125, 1.25, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 3.0, 5.0, 8.0, 12.0],
}  # fmt: skip
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "sliding_attention": {**PLAIN, "rope_theta": 500.0},
}
MULTIPLIERS = {
    "embedding_multiplier": 1.5, "attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "rms_norm_eps": 0.05,
}  # fmt: skip
# Heads of 16, where their size is not a setting.
NO_HEAD_DIM = {"hidden_size": 64}
TWO_HEADS = {"num_attention_heads": 2, "intermediate_size": 32}
# What is different from SIZES; AROUND are settings of layers that these models do not have.
AROUND = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16, "num_local_experts": 0,
    "num_experts_per_tok": 0,
}  # fmt: skip
# Latent attention: 32 elements of the latent, and 16 rotated ones.
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "experts_implementation": "eager",
}  # fmt: skip
# A setting of SIZES that a class does not have.
ABSENT = object()
DENSE_LATENT = {key: LATENT[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "num_key_value_heads")}
# Experts that are chosen by sigmoids.
SIGMOIDS = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32, "tie_word_embeddings": False,
    "rope_parameters": PLAIN, "experts_implementation": "eager",
}  # fmt: skip
SPACE = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 1,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "model_type": "nemotron_h", "num_hidden_layers": ABSENT, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 16, "chunk_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "jais2": {"model_type": "jais2", "tie_word_embeddings": False, "rope_parameters": PLAIN},
    "deepseekmoe": {
        "model_type": "deepseek", **{key: of for key, of in SIGMOIDS.items() if key != "intermediate_size"},
        "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
    # Every second layer has experts, and layer 3 of 4 has no rotary embedding.
    "llama4": {
        "model_type": "llama4_text", "num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 64,
        "num_local_experts": 6, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 512,
        "floor_scale": 8, "attn_scale": 0.5, "rms_norm_eps": 0.05, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "youtu": {
        "model_type": "youtu", **DENSE_LATENT, "head_dim": ABSENT, "q_lora_rank": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "rope_parameters": PLAIN,
    },
    "minicpm3": {
        "model_type": "minicpm3", **DENSE_LATENT, "head_dim": ABSENT, "q_lora_rank": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 8, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rms_norm_eps": 0.05,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + j / 8 for j in range(8)],
            "long_factor": [1 + j / 2 for j in range(8)], "original_max_position_embeddings": 512,
        },
    },
    "mistral4": {
        "model_type": "mistral4", **LATENT, "head_dim": ABSENT, "q_lora_rank": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            "partial_rotary_factor": 1 / 3,
        },
    },
    "dots1": {
        "model_type": "dots1", **SIGMOIDS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "sliding_window": None,
    },
    "solaropen": {
        "model_type": "solar_open", **SIGMOIDS, "intermediate_size": ABSENT, "n_routed_experts": 8,
        "n_shared_experts": 1, "rope_parameters": YARN,
    },
    "exaonemoe": {
        "model_type": "exaone_moe", **SIGMOIDS, "num_hidden_layers": 4, "sliding_window": 8, "num_experts": 8,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
    "afmoe": {
        "model_type": "afmoe", **SIGMOIDS, "num_hidden_layers": 4, "sliding_window": 8, "num_experts": 8,
        "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True,
    },
    "granite4h": {
        "model_type": "granitemoehybrid", **NO_HEAD_DIM, "rope_parameters": PLAIN, **MULTIPLIERS,
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_groups": 2,
        "mamba_chunk_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32,
        "shared_intermediate_size": 64, "position_embedding_type": None, "experts_implementation": "eager",
    },
    "nemotronh": {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "nemotron3": {
        **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5, "experts_implementation": "eager",
    },
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 2,
        "chunk_size": 16,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), ABSENT),
        "max_position_embeddings": ABSENT,
    },
    "falconh1": {
        "model_type": "falcon_h1", **NO_HEAD_DIM, **SPACE, "rope_parameters": PLAIN, "tie_word_embeddings": False,
        # Powers of 2, so that Q8_0 rounds weights with and without them alike.
        "mamba_norm_before_gate": False, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.25,
        "mlp_multipliers": [0.5, 0.25], "key_multiplier": 0.25, "attention_in_multiplier": 2.0,
        "attention_out_multiplier": 0.5, "ssm_in_multiplier": 2.0, "ssm_multipliers": [0.5, 0.25, 2.0, 0.5, 4.0],
        "ssm_out_multiplier": 0.5,
    },
    "deepseek2lite": {
        "model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "n_shared_experts": 2, "routed_scaling_factor": 1.5,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek3": {
        "model_type": "deepseek_v3", **LATENT, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4moelite": {
        "model_type": "glm4_moe_lite", **LATENT, "q_lora_rank": 32, "qk_nope_head_dim": 48, "v_head_dim": 64,
        "n_shared_experts": 1, "rope_parameters": PLAIN, "mlp_layer_types": ["dense", "sparse"],
    },
    "ernie4_5moe": {
        "model_type": "ernie4_5_moe", **NO_HEAD_DIM, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2, "rope_parameters": PLAIN, "experts_implementation": "eager",
    },
    "granitemoe": {
        "model_type": "granitemoe", **NO_HEAD_DIM, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 32, "rope_parameters": PLAIN, **MULTIPLIERS, "experts_implementation": "eager",
    },
    "hunyuanmoe": {
        "model_type": "hunyuan_v1_moe", "intermediate_size": 32, "num_experts": 6, "moe_topk": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 4.0, "factor": 1.0},
        "experts_implementation": "eager",
    },
    "lfm2moe": {
        "model_type": "lfm2_moe", **NO_HEAD_DIM, "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"],
        "rope_parameters": PLAIN, "experts_implementation": "eager",
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "tie_word_embeddings": False, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}, "experts_implementation": "eager",
    },
    "minimaxm2": {
        "model_type": "minimax_m2", "tie_word_embeddings": False, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 32, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        "experts_implementation": "eager",
    },
    "glm4moe": {
        "model_type": "glm4_moe", "num_hidden_layers": 2, "tie_word_embeddings": False, "attention_bias": True,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "intermediate_size": 32,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "experts_implementation": "eager",
    },
    "olmoe": {
        "model_type": "olmoe", **TWO_HEADS, "tie_word_embeddings": False, "num_experts": 6, "num_experts_per_tok": 2,
        "rope_parameters": PLAIN, "experts_implementation": "eager",
    },
    "arcee": {"model_type": "arcee", "rope_parameters": PLAIN},
    "cohere2": {
        "model_type": "cohere2", **TWO_HEADS, "num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.25,
        "rope_parameters": {**PLAIN, "rope_theta": 500.0},
    },
    "glm4": {
        "model_type": "glm4", "tie_word_embeddings": False, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "seed_oss": {
        "model_type": "seed_oss", "tie_word_embeddings": False, "attention_out_bias": True, "rope_parameters": PLAIN,
    },
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True, "rope_parameters": PLAIN},
    "exaone4": {
        "model_type": "exaone4", **TWO_HEADS, "num_hidden_layers": 4, "sliding_window": 8,
        "tie_word_embeddings": False, "rope_parameters": {**PLAIN, "rope_theta": 500.0},
    },
    "starcoder2": {
        "model_type": "starcoder2", **TWO_HEADS, "rope_parameters": PLAIN,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense", "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 4.0, "factor": 1.0},
    },
    "nanochat": {
        "model_type": "nanochat", **TWO_HEADS, "tie_word_embeddings": False, "rope_parameters": PLAIN,
        "final_logit_softcapping": 5.0,
    },
    "llamabias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "rope_parameters": {**PLAIN, "rope_theta": 5e4}},
    "phi3": {
        "model_type": "phi3", **NO_HEAD_DIM, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64,
        "sliding_window": 20,
    },
    "ministral3": {
        "model_type": "ministral3", "tie_word_embeddings": False,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "granite": {"model_type": "granite", **NO_HEAD_DIM, "rope_parameters": PLAIN, **MULTIPLIERS},
    "granite4": {
        "model_type": "granitemoehybrid", **NO_HEAD_DIM, "rope_parameters": PLAIN, **MULTIPLIERS, **AROUND,
        "shared_intermediate_size": 64, "position_embedding_type": "rope", "layer_types": ["full_attention"] * 2,
    },
    # Like E2B: inputs for each layer, and layers that share keys and values, with an FFN of twice the width.
    "gemma4e": {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32, "sliding_window": 8, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "rope_parameters": PROPORTIONAL,
    },
    # Like 31B: keys and values of global layers are one projection.
    "gemma4": {
        "model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 8, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_parameters": PROPORTIONAL,
    },
    # Like 26B-A4B: a mixture of experts beside each dense FFN.
    "gemma4moe": {
        "model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 8, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_parameters": PROPORTIONAL,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
        "experts_implementation": "eager",
    },
    "olmo2": {"model_type": "olmo2", **NO_HEAD_DIM, "rope_parameters": PLAIN, "tie_word_embeddings": False},
    "olmo3": {
        "model_type": "olmo3", **NO_HEAD_DIM, "num_hidden_layers": 4, "sliding_window": 8, "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "cohere": {
        "model_type": "cohere", **NO_HEAD_DIM, "attention_bias": True, "logit_scale": 0.25, "rope_parameters": PLAIN,
        "head_dim": ABSENT,
    },
    "glm": {
        "model_type": "glm", "tie_word_embeddings": False, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "helium": {
        "model_type": "helium", "tie_word_embeddings": False, **NO_HEAD_DIM, "mlp_bias": True, "rope_parameters": PLAIN,
    },
    "nemotron": {
        "model_type": "nemotron", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "gemma": {"model_type": "gemma", "rope_parameters": PLAIN},
    "stablelm": {
        "model_type": "stablelm", **NO_HEAD_DIM, "head_dim": ABSENT, "tie_word_embeddings": False, "use_qkv_bias": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
    },
    "phi": {
        "model_type": "phi", **NO_HEAD_DIM, "head_dim": ABSENT, "tie_word_embeddings": False,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "gptneox": {
        "model_type": "gpt_neox", **NO_HEAD_DIM, "head_dim": ABSENT, "num_key_value_heads": ABSENT,
        "hidden_act": "gelu_new", "intermediate_size": 256, "tie_word_embeddings": False,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
    },
    "bigcode": {
        "model_type": "gpt_bigcode", **NO_HEAD_DIM,
        **dict.fromkeys(("head_dim", "intermediate_size", "num_key_value_heads"), ABSENT),
    },
    "exaone": {
        "model_type": "exaone", **NO_HEAD_DIM, "head_dim": ABSENT, "tie_word_embeddings": False,
        "rope_parameters": PLAIN,
    },
    "olmo": {
        "model_type": "olmo", **NO_HEAD_DIM, "head_dim": ABSENT, "tie_word_embeddings": False,
        "rope_parameters": PLAIN,
    },
    "minicpm": {
        "model_type": "granite", **NO_HEAD_DIM, "rope_parameters": PLAIN, **MULTIPLIERS, "attention_multiplier": 0.25,
        "tie_word_embeddings": False,
    },
    "internlm2": {
        "model_type": "llama", **NO_HEAD_DIM, "head_dim": ABSENT, "num_key_value_heads": 2,
        "tie_word_embeddings": False, "attention_bias": True, "rope_parameters": PLAIN,
    },
    "mimo": {
        "model_type": "qwen2", **NO_HEAD_DIM, "head_dim": ABSENT, "tie_word_embeddings": False,
        "rope_parameters": PLAIN,
    },
    "telechat3": {"model_type": "llama", "tie_word_embeddings": False, "rope_parameters": YARN},
    "lille": {
        "model_type": "helium", **NO_HEAD_DIM, "intermediate_size": 256, "rope_parameters": PLAIN, "rms_norm_eps": 0.05,
    },
    "internlm3": {
        "model_type": "internlm3", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": PLAIN,
    },
    "mellum": {
        "model_type": "mellum", **TWO_HEADS, "tie_word_embeddings": False, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}, "experts_implementation": "eager",
    },
    "vaultgemma": {
        "model_type": "vaultgemma", "sliding_window": 8, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 12.0, "rope_parameters": PLAIN,
    },
    "cwm": {
        "model_type": "cwm", "bos_token_id": 0, "tie_word_embeddings": False, "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip
# Models that transformers does not have: `model_type`, other settings, and other parts of the names of tensors. Each
# computes what the class in MODELS computes.
RENAMED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "minicpm": ("minicpm", {"scale_emb": 1.5, "scale_depth": 0.22 * 2**0.5, "dim_model_base": 8}, {}),
    "mimo": ("mimo", {}, {}),
    "telechat3": ("telechat3", {}, {}),
    "internlm2": ("internlm2", {"bias": True}, {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "self_attn.qkv": "attention.wqkv",
    }),
    "lille": ("lille-130m", {
        "n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_heads": 1, "block_size": 512, "layer_norm_eps": 0.05,
    }, {
        "model.": "transformer.", "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.out_proj",
        "input_layernorm": "attention.norm", "post_attention_layernorm": "feed_forward.norm", "mlp.": "feed_forward.",
        "self_attn.qkv": "attention.qkv_proj",
    }),
}  # fmt: skip
# Keys of the classes in MODELS that these models do not have.
DROPPED: dict[str, tuple[str, ...]] = {
    "minicpm": ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    "internlm2": ("attention_bias", "mlp_bias", "head_dim"),
    "lille": (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "rms_norm_eps", "head_dim", "intermediate_size", "hidden_act",
    ),
}  # fmt: skip
# Attention scores of these models have the scale 1: the norms of queries make up for the head dim.
SMALL_QUERIES = ("gemma4", "gemma4e", "gemma4moe")
PROMPTS = (5, 39)
# Longer than the training context of LongRoPE; without greedy ids, and for a model that is loaded for such a context.
LONG = {"phi3": 100, "llama4": 60}
# Tokens of a chunk of Llama 4 in its longer prompt.
CHUNK = 21
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn mscale": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn attention_factor": {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
        "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn truncate": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
        "short_factor": [1 + j / 64 for j in range(32)], "long_factor": [1 + j for j in range(32)],
    },
}  # fmt: skip
CONTEXT, HEAD_DIM = 131_072, 64


# Biases of the choice of experts.
CHOICE = ("e_score_correction_bias", "expert_bias")


class DeepseekConfig(LlamaConfig):
    """The settings of the first DeepSeek with experts."""

    model_type = "deepseek"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}


class DeepseekForCausalLM(modeling_llama.LlamaForCausalLM):
    """The first DeepSeek with experts: Llama's attention, and DeepSeek-V2's experts without groups."""

    config_class = DeepseekConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace :]:
            layer.mlp = modeling_deepseek_v2.DeepseekV2Moe(config)


AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)


def build(name: str, seed: int) -> PreTrainedModel:
    """Set random weights for which every part matters, rounded to bfloat16, so that the file has exactly these."""
    settings = {key: value for key, value in {**SIZES, **MODELS[name]}.items() if value is not ABSENT}
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    made.config.eos_token_id = None  # some classes replace None by the ids of their published models
    random = np.random.default_rng(seed)
    for stem, parameter in made.named_parameters():
        if stem.endswith(CHOICE):
            values = random.uniform(-0.3, 0.3, parameter.shape)
        elif stem.endswith("A_log"):
            values = random.uniform(-4.0, 0.5, parameter.shape)
        elif stem.endswith("dt_bias"):
            values = random.normal(0, 0.5, parameter.shape)
        elif parameter.ndim == 1:
            values = random.uniform(0.5, 2.0, parameter.shape)
            if stem.endswith("q_norm.weight") and name in SMALL_QUERIES:
                values *= 0.25
        else:
            small = 0.5 if {"o_proj", "out_proj", "down_proj", "output_linear"} & set(stem.split(".")) else 1.2
            values = random.normal(0, 0.5 if "embed" in stem else small * parameter.shape[-1] ** -0.5, parameter.shape)
        parameter.data = torch.from_numpy(values).to(torch.bfloat16).to(torch.float64)
    for stem, buffer in made.named_buffers():
        if stem.endswith("layer_scalar"):
            buffer.data = torch.from_numpy(random.uniform(0.5, 1.0, 1)).to(torch.bfloat16).to(torch.float64)
        if stem.endswith(CHOICE):
            buffer.data = torch.from_numpy(random.uniform(-0.3, 0.3, buffer.shape)).to(torch.bfloat16).to(torch.float64)
    return made.eval()


def make(name: str) -> None:
    """Write a folder of tests/data, with the first seed for which no greedy step is nearly a tie."""
    folder = DATA / f"{name}-micro"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    for seed in range(100):
        try:
            golden = computed(name, seed, folder)
            break
        except ValueError as error:
            print(name, seed, error)
    np.savez_compressed(folder / "golden.npz", **golden)
    (folder / "hf" / "generation_config.json").unlink(missing_ok=True)
    print(folder.name, {key: values.shape for key, values in golden.items()})


def computed(name: str, seed: int, folder: Any) -> dict[str, np.ndarray]:
    """Write the checkpoint and return the results."""
    random, golden = np.random.default_rng(seed + 1000), {}
    prompts = [random.integers(0, VOCAB, n).tolist() for n in PROMPTS]
    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        model = build(name, seed)
        stored = {stem: values.to(torch.bfloat16) for stem, values in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del stored["lm_head.weight"]
        model.save_pretrained(folder / "hf", state_dict=stored)
        if name in RENAMED:
            rename(name, folder / "hf")
        if name in LONG:
            golden["long"] = random.integers(0, VOCAB, LONG[name]).astype(np.int32)
            chunk = CHUNK if name == "llama4" else getattr(model.config, "attention_chunk_size", None)
            with mock.patch.object(model.config, "attention_chunk_size", chunk, create=True):
                golden["logits_long"] = logits_of(model, golden["long"].tolist()).astype(np.float32)
        for suffix in ("", "_q8"):
            if suffix:
                to_q8_0(model)
            stack.enter_context(clear_choices(model))
            for i, prompt in enumerate(prompts):
                golden[f"prompt{i}"] = np.array(prompt, np.int32)
                golden[f"logits{i}{suffix}"] = logits_of(model, prompt).astype(np.float32)
                golden[f"greedy{i}{suffix}"] = np.array(greedy(model, prompt), np.int32)
    return golden


def rename(name: str, folder: Path) -> None:
    """Rewrite a folder with the names of a model that transformers does not have."""
    kind, settings, names = RENAMED[name]
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in DROPPED.get(name, ())}
    (folder / "config.json").write_text(json.dumps(config | settings | {"model_type": kind}, indent=2) + "\n")
    tensors = fused(name, load_file(folder / "model.safetensors"))
    made = {}
    for stem, values in tensors.items():
        for part, other in names.items():
            stem = stem.replace(part, other)
        made[stem] = values.contiguous()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def fused(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with queries, keys and values in one."""
    made = dict(tensors)
    for stem in [stem for stem in tensors if ".q_proj." in stem and name in ("internlm2", "lille")]:
        parts = [made.pop(stem.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        if name == "internlm2":  # the heads that share a key head, the key head, the value head
            n, rest = MODELS[name]["num_key_value_heads"], parts[0].shape[1:]
            parts = [torch.cat([part.reshape(n, -1, *rest) for part in parts], 1).reshape(-1, *rest)]
        made[stem.replace("q_proj", "qkv")] = torch.cat(parts)
    return made


def make_rotations() -> None:
    """Write the frequencies and attention factors of `SETTINGS`, and of some for twice the context."""
    with (
        mock.patch.object(rope_utils, "torch", DoubleTorch()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        made = {name: {"settings": settings, "usual": rotation(settings)} for name, settings in SETTINGS.items()}
        made["dynamic"]["long"] = rotation(SETTINGS["dynamic"], 2 * CONTEXT)
        made["longrope"]["long"] = rotation(SETTINGS["longrope"], CONTEXT)
    (DATA / "rope-scaling.json").write_text(json.dumps(made, indent=1) + "\n")


def rotation(settings: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return what transformers makes of a setting."""
    config = AutoConfig.for_model(
        "llama", head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, rope_parameters=dict(settings)
    )
    frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, seq_len=length)
    return {"frequencies": frequencies.tolist(), "attention_factor": factor}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or (*MODELS, "rotations"):
        if chosen == "rotations":
            make_rotations()
        else:
            make(chosen)
