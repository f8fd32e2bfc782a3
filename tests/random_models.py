"""Small models of every architecture with random weights of one type, wide enough for blocks of 256 weights."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import Model, architecture_of, load_model, plan_model
from tests.random_blocks import random_blocks

CONTEXT, VOCAB, LAYERS, WINDOW = 640, 300, 2, 40
_DECODER = {
    "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4, "vocab_size": VOCAB,
}  # fmt: skip
_FOLDER = {
    "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
_HEADS = {"attention.key_length": 64, "attention.value_length": 64}
_LAYER_NORMS = {"attention.layer_norm_epsilon": 1e-5, **{key: of for key, of in _DECODER.items() if "rms" not in key}}
# Architectures whose layers are those of others: tests that run all run these with `-m slow`, or a sample of them.
SAMPLED = (
    "jais2",
    "deepseek", "llama4", "minicpm3", "mistral4",
    "afmoe", "dots1", "exaone-moe", "solar_open",
    "deepseek2", "ernie4_5-moe", "granitemoe", "hunyuan-moe", "lfm2moe", "qwen3next",
    "falcon-h1", "mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe",
    "glm4moe", "minimax-m2", "olmoe",
    "arcee",
    "cohere2", "ernie4_5", "exaone4", "glm4", "granite", "hunyuan-dense", "mixtral", "nanochat", "seed_oss", "smollm3",
    "starcoder2",
    "command-r",
    "chatglm",
    "helium",
    "nemotron",
    "gemma",
    "stablelm",
    "phi2",
    "gptneox",
    "starcoder",
    "exaone",
    "olmo",
    "internlm3",
    "lille-130m",
    "telechat3",
    "mimo",
    "internlm2",
    "minicpm",
    "mellum",
    "cwm",
    "vaultgemma",
)  # fmt: skip
# By architecture: the naming of its files, and their settings.
_SPACE = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 256,
}
_MIXERS = {key: of for key, of in _DECODER.items() if not key.startswith(("feed", "rope", "attention.head"))} | _SPACE
_SPARSE = {
    **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
    "expert_shared_count": 1, "leading_dense_block_count": 1,
}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "jais2": ("gguf", _LAYER_NORMS),
    "afmoe": ("gguf", {**_SPARSE, "attention.sliding_window": WINDOW}),
    "dots1": ("gguf", {**_SPARSE, "expert_group_count": 3, "expert_group_used_count": 2}),
    "exaone-moe": ("gguf", {
        **_SPARSE, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False],
    }),
    "deepseek": ("gguf", _SPARSE),
    "llama4": ("gguf", {
        **{key: of for key, of in _SPARSE.items() if key not in ("expert_shared_count", "leading_dense_block_count")},
        "expert_used_count": 1, "interleave_moe_layer_step": 2,
    }),
    "minicpm3": ("gguf", {
        **_DECODER, "attention.head_count_kv": 4, "attention.key_length": 320, "attention.value_length": 64,
        "attention.kv_lora_rank": 256, "attention.q_lora_rank": 256, "rope.dimension_count": 64,
    }),
    "mistral4": ("gguf", {
        **_SPARSE, "attention.head_count_kv": 1, "attention.key_length": 320, "attention.value_length": 256,
        "attention.key_length_mla": 320, "attention.value_length_mla": 64, "attention.kv_lora_rank": 256,
        "attention.q_lora_rank": 256, "rope.dimension_count": 64, "expert_group_count": 3,
        "expert_group_used_count": 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.1,
        "attention.temperature_scale": 0.1,
    }),
    "solar_open": ("hf", {
        "num_hidden_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    }),
    "deepseek2": ("gguf", {
        **_DECODER, "attention.head_count_kv": 1, "attention.key_length": 320, "attention.value_length": 256,
        "attention.key_length_mla": 320, "attention.value_length_mla": 64, "attention.kv_lora_rank": 256,
        "attention.q_lora_rank": 256, "rope.dimension_count": 64, "expert_count": 6, "expert_used_count": 2,
        "expert_feed_forward_length": 256, "expert_shared_count": 1, "leading_dense_block_count": 1,
        "expert_gating_func": 1, "expert_weights_norm": False,
    }),
    "ernie4_5-moe": ("gguf", {
        **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "expert_shared_count": 2, "leading_dense_block_count": 1,
    }),
    "granitemoe": ("gguf", {
        **_DECODER, "attention.scale": 0.1, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0,
        "expert_count": 6, "expert_used_count": 2,
    }),
    "hunyuan-moe": ("gguf", {
        **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 512,
    }),
    "lfm2moe": ("gguf", {
        **_DECODER, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "expert_count": 6,
        "expert_used_count": 2, "expert_feed_forward_length": 256, "leading_dense_block_count": 1,
    }),
    "qwen3next": ("gguf", {
        **_DECODER, **_HEADS, "rope.dimension_count": 16, "ssm.conv_kernel": 4, "ssm.state_size": 32,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256, "full_attention_interval": 2,
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "expert_shared_feed_forward_length": 256,
    }),
    "falcon-h1": ("gguf", {**_DECODER, **_HEADS, **_SPACE}),
    "mamba2": ("gguf", _MIXERS),
    "granitehybrid": ("gguf", {
        **_DECODER, **_SPACE, "attention.head_count_kv": [0, 2], "attention.scale": 0.1, "embedding_scale": 2.0,
        "residual_scale": 0.5, "logit_scale": 4.0, "expert_count": 6, "expert_used_count": 2,
        "expert_shared_feed_forward_length": 256, "rope.scaling.finetuned": False,
    }),
    "nemotron_h": ("gguf", {
        **_DECODER, **_SPACE, "block_count": 3, "attention.head_count_kv": [0, 2, 0],
        "feed_forward_length": [0, 0, 512], **_HEADS,
    }),
    "nemotron_h_moe": ("gguf", {
        **_DECODER, **_SPACE, "block_count": 3, "attention.head_count_kv": [0, 2, 0],
        "feed_forward_length": [0, 0, 256], **_HEADS, "expert_count": 6, "expert_used_count": 2,
        "expert_shared_feed_forward_length": 512, "expert_weights_scale": 2.5,
    }),
    "glm4moe": ("gguf", {
        **_DECODER, **_HEADS, "rope.dimension_count": 32, "expert_count": 6, "expert_used_count": 2,
        "expert_feed_forward_length": 256, "leading_dense_block_count": 1, "expert_weights_scale": 1.5,
        "expert_group_count": 3, "expert_group_used_count": 2,
    }),
    "minimax-m2": ("gguf", {
        **_DECODER, **_HEADS, "rope.dimension_count": 32, "expert_count": 6, "expert_used_count": 2,
        "expert_feed_forward_length": 512,
    }),
    "olmoe": ("gguf", {**_DECODER, "expert_count": 6, "expert_used_count": 2}),
    "arcee": ("gguf", _DECODER),
    "cohere2": ("gguf", {
        **_LAYER_NORMS, "logit_scale": 0.25, "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, False],
    }),
    "ernie4_5": ("gguf", {**_DECODER, **_HEADS}),
    "exaone4": ("gguf", {
        **_DECODER, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False],
    }),
    "glm4": ("gguf", {**_DECODER, **_HEADS, "rope.dimension_count": 32}),
    "granite": ("gguf", {
        **_DECODER, "attention.scale": 0.1, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0,
    }),
    "hunyuan-dense": ("gguf", {**_DECODER, **_HEADS}),
    "mixtral": ("hf", {
        "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True, "hidden_act": "silu",
    }),
    "nanochat": ("gguf", {**_DECODER, "final_logit_softcapping": 5.0}),
    "seed_oss": ("gguf", {**_DECODER, **_HEADS}),
    "smollm3": ("gguf", _DECODER),
    "starcoder2": ("gguf", _LAYER_NORMS),
    "gemma2": ("gguf", {
        **_DECODER, **_HEADS, "attention.sliding_window": WINDOW, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    }),
    "gemma3": ("gguf", {
        **_DECODER, **_HEADS, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2,
    }),
    "gemma4": ("gguf", {
        **_DECODER, "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
        "attention.key_length_swa": 64, "attention.value_length_swa": 64, "rope.dimension_count_swa": 64,
        "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False],
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
    }),
    "gpt-oss": ("gguf", {
        **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 512,
        "attention.sliding_window": WINDOW, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
    }),
    "gpt2": ("gguf", {
        "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
    }),
    "llama": ("gguf", {**_DECODER, "rope.dimension_count": 64}),
    "mistral": ("hf", {
        "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW, "tie_word_embeddings": True, "hidden_act": "silu",
    }),
    "lfm2": ("hf", {
        "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "norm_eps": 1e-6,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1],
    }),
    "ministral3": ("gguf", {
        **_DECODER, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 1.0,
        "rope.scaling.original_context_length": 32, "attention.temperature_scale": 0.1,
    }),
    "olmo2": ("gguf", {
        **_DECODER, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False],
    }),
    "phi3": ("gguf", {**_DECODER, "rope.dimension_count": 48}),
    "qwen2": ("gguf", _DECODER),
    "qwen3": ("gguf", {**_DECODER, **_HEADS}),
    "qwen2moe": ("gguf", {
        **_DECODER, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "expert_shared_feed_forward_length": 512,
    }),
    "qwen3moe": ("gguf", {
        **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
    }),
    "qwen35": ("gguf", {
        **_DECODER, **_HEADS, "rope.dimension_count": 16, "ssm.conv_kernel": 4, "ssm.state_size": 32,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256, "full_attention_interval": 2,
    }),
    "qwen35moe": ("gguf", {
        **_DECODER, **_HEADS, "rope.dimension_count": 16, "ssm.conv_kernel": 4, "ssm.state_size": 32,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256, "full_attention_interval": 2,
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "expert_shared_feed_forward_length": 256,
    }),
    "command-r": ("gguf", {**_LAYER_NORMS, "logit_scale": 0.25}),
    "chatglm": ("gguf", {**_DECODER, "rope.dimension_count": 32}),
    "helium": ("hf", {**_FOLDER, "head_dim": 64}),
    "nemotron": ("gguf", {**_LAYER_NORMS, "rope.dimension_count": 32}),
    "gemma": ("gguf", {**_DECODER, **_HEADS}),
    "stablelm": ("gguf", {**_LAYER_NORMS, "rope.dimension_count": 16}),
    "phi2": ("gguf", {**_LAYER_NORMS, "rope.dimension_count": 32}),
    "gptneox": ("gguf", {**_LAYER_NORMS, "attention.head_count_kv": 4, "rope.dimension_count": 16}),
    "starcoder": ("gguf", {
        "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
    }),
    "exaone": ("gguf", _DECODER),
    "minicpm": ("gguf", {**_DECODER, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0}),
    "internlm2": ("gguf", _DECODER),
    "mimo": ("hf", _FOLDER),
    "telechat3": ("hf", _FOLDER),
    "lille-130m": ("hf", {
        "n_layer": LAYERS, "n_embd": 256, "n_head": 4, "n_kv_heads": 2, "vocab_size": VOCAB, "block_size": CONTEXT,
        "layer_norm_eps": 1e-6,
    }),
    "internlm3": ("hf", {**_FOLDER, "head_dim": 64}),
    "olmo": ("gguf", {**_LAYER_NORMS, "rope.dimension_count": 64}),
    "mellum": ("gguf", {
        **_DECODER, **_HEADS, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False],
    }),
    "vaultgemma": ("gguf", {
        **_DECODER, **_HEADS, "attention.sliding_window": WINDOW, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    }),
    "cwm": ("gguf", {
        **_DECODER, **_HEADS, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [False, True],
    }),
}  # fmt: skip
# What is looked up or added, never multiplied; and routers, which are never quantised.
_FLOATS = ("position_embd", "conv")


def random_checkpoint(architecture: str, type_name: str, **changes: Any) -> Checkpoint:
    """Return a checkpoint whose matrices have random values of a type; `changes` are other settings."""
    naming, settings = SETTINGS[architecture]
    settings = {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}
    made: dict[str, Weight] = {}
    draft = Checkpoint("random", naming, architecture, settings, {}, {"token_embd.weight": (VOCAB, 256)}, made.get)  # type: ignore[arg-type]
    for tensor in architecture_of(draft).plan(draft).tensors:
        stored = tensor.stored(draft.naming)
        if tensor.required and stored.name not in made:
            made[stored.name] = _weight(stored.name, stored.shape(tensor.shape), type_name)
    shapes = {name: weight.shape for name, weight in made.items()}
    return Checkpoint("random", naming, architecture, settings, {}, shapes, made.__getitem__)  # type: ignore[arg-type]


def random_model(architecture: str, type_name: str, backend: Backend) -> Model:
    """Return a model whose matrices have random values of a type."""
    return load_model(random_checkpoint(architecture, type_name), backend)


def with_mtp(of: Checkpoint, type_name: str) -> Checkpoint:
    """Return a GGUF checkpoint of Qwen3.5 with a layer of multi-token prediction, whose values are random."""
    s, i = of.settings, int(of.settings["block_count"])
    D, E, F = s["embedding_length"], s["attention.key_length"], s["feed_forward_length"]
    H, G = s["attention.head_count"], s["attention.head_count_kv"]
    ffn = {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    if "expert_count" in s:
        X, F, S = (s[f"expert_{key}"] for key in ("count", "feed_forward_length", "shared_feed_forward_length"))
        ffn = {
            "ffn_gate_inp": (X, D), "ffn_gate_exps": (X, F, D), "ffn_up_exps": (X, F, D), "ffn_down_exps": (X, D, F),
            "ffn_gate_inp_shexp": (D,), "ffn_gate_shexp": (S, D), "ffn_up_shexp": (S, D), "ffn_down_shexp": (D, S),
        }  # fmt: skip
    shapes = {
        "attn_norm": (D,), "post_attention_norm": (D,), "attn_q": (2 * H * E, D), "attn_k": (G * E, D),
        "attn_v": (G * E, D), "attn_q_norm": (E,), "attn_k_norm": (E,), "attn_output": (D, H * E),
        **ffn, "nextn.eh_proj": (D, 2 * D), "nextn.enorm": (D,), "nextn.hnorm": (D,), "nextn.shared_head_norm": (D,),
    }  # fmt: skip
    more = {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
    settings, read = {**s, "block_count": i + 1, "nextn_predict_layers": 1}, of.weight

    def weight(name: str) -> Weight:
        return _weight(name, more[name], type_name) if name in more else read(name)

    return Checkpoint(of.where, of.naming, of.architecture, settings, of.metadata, {**of.shapes, **more}, weight)


def random_model_with_mtp(type_name: str, backend: Backend) -> Model:
    """Return a Qwen3.5 model with a layer of multi-token prediction."""
    checkpoint = with_mtp(random_checkpoint("qwen35", type_name), type_name)
    return plan_model(checkpoint, Conversion(), with_extra=True).build(backend).model


@cache
def _weight(name: str, shape: tuple[int, ...], type_name: str) -> Weight:
    """Return the same values in every model: they are drawn from the tensor's name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if math.prod(shape[1:]) == 1 or "ssm_norm" in name:
        is_factor = ("norm" in name and name.endswith("weight")) or "scale" in name
        mean = 1.0 if is_factor else -0.5 if name.endswith("ssm_a") else 0.0
        return Weight.pack(name, (mean + 0.1 * rng.standard_normal(shape)).astype(np.float32), BY_NAME["F32"])
    if name.endswith(".bias"):  # of all experts
        return Weight.pack(name, (0.1 * rng.standard_normal(shape)).astype(np.float32), BY_NAME["F32"])
    *rows, k = shape
    n = math.prod(rows)
    is_float = any(part in name for part in (*_FLOATS, "ffn_gate_inp")) or (len(shape) == 3 and "exps" not in name)
    if type_name == "Q4_K" and not is_float:
        return replace(random_blocks(rng, name, type_name, n, k, k**-0.5), shape=shape)
    values = (rng.standard_normal(shape) * k**-0.5).astype(np.float32)
    return Weight.pack(name, values, BY_NAME["F32" if is_float else type_name])
