"""Write GGUF files by gguf-py's own tensor map and llama.cpp's conventions. Shares no line with mlx_engine.

`convert.py` has names of its own for the first architectures, and converts tensors that llama.cpp computes anew. Here
the names are those of `gguf.get_tensor_name_map`, so that a name or an order of rows that our writer and our reader
have wrong in the same way is seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.convert import read_safetensors

ARCH = gguf.MODEL_ARCH
# model_type -> architecture.
ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {
    "jais2": ARCH.JAIS2,
    "deepseek": ARCH.DEEPSEEK, "llama4_text": ARCH.LLAMA4,
    "minicpm3": ARCH.MINICPM3, "mistral4": ARCH.MISTRAL4, "youtu": ARCH.DEEPSEEK2,
    "afmoe": ARCH.AFMOE, "dots1": ARCH.DOTS1, "exaone_moe": ARCH.EXAONE_MOE, "solar_open": ARCH.GLM4_MOE,
    "deepseek_v2": ARCH.DEEPSEEK2, "deepseek_v3": ARCH.DEEPSEEK2, "glm4_moe_lite": ARCH.DEEPSEEK2,
    "ernie4_5_moe": ARCH.ERNIE4_5_MOE, "granitemoe": ARCH.GRANITE_MOE, "hunyuan_v1_moe": ARCH.HUNYUAN_MOE,
    "lfm2_moe": ARCH.LFM2MOE, "qwen3_next": ARCH.QWEN3NEXT,
    "falcon_h1": ARCH.FALCON_H1, "mamba2": ARCH.MAMBA2, "granitemoehybrid": ARCH.GRANITE_HYBRID,
    "nemotron_h": ARCH.NEMOTRON_H,
    "glm4_moe": ARCH.GLM4_MOE, "minimax_m2": ARCH.MINIMAXM2, "olmoe": ARCH.OLMOE,
    "arcee": ARCH.ARCEE,
    "cohere2": ARCH.COHERE2, "ernie4_5": ARCH.ERNIE4_5, "exaone4": ARCH.EXAONE4, "gemma2": ARCH.GEMMA2,
    "gemma3_text": ARCH.GEMMA3, "glm4": ARCH.GLM4, "granite": ARCH.GRANITE, "hunyuan_v1_dense": ARCH.HUNYUAN_DENSE,
    "llama": ARCH.LLAMA, "ministral3": ARCH.MISTRAL3, "mistral": ARCH.LLAMA, "mixtral": ARCH.LLAMA,
    "olmo2": ARCH.OLMO2, "olmo3": ARCH.OLMO2, "phi3": ARCH.PHI3, "qwen2": ARCH.QWEN2, "qwen2_moe": ARCH.QWEN2MOE,
    "qwen3": ARCH.QWEN3, "qwen3_moe": ARCH.QWEN3MOE, "seed_oss": ARCH.SEED_OSS, "smollm3": ARCH.SMOLLM3,
    "starcoder2": ARCH.STARCODER2,
    "cohere": ARCH.COMMAND_R,
    "glm": ARCH.CHATGLM,
    "nemotron": ARCH.NEMOTRON,
    "helium": ARCH.LLAMA,
    "gemma": ARCH.GEMMA,
    "stablelm": ARCH.STABLELM,
    "phi": ARCH.PHI2,
    "gpt_neox": ARCH.GPTNEOX,
    "gpt_bigcode": ARCH.STARCODER,
    "exaone": ARCH.EXAONE,
    "internlm3": ARCH.LLAMA,
    "minicpm": ARCH.MINICPM,
    "internlm2": ARCH.INTERNLM2,
    "mimo": ARCH.QWEN2,
    "telechat3": ARCH.LLAMA,
    "lille-130m": ARCH.LLAMA,
    "olmo": ARCH.OLMO,
}  # fmt: skip
# What their converters do beside renaming, which is more than half of them; `convert.py` or other tests have it.
ELSEWHERE = {
    "gpt2": "convert.py", "lfm2": "convert.py", "qwen3_5_text": "convert.py", "qwen3_5_moe_text": "convert.py",
    "gemma4_text": "arrays of settings for each layer, and computed rope_freqs", "gpt_oss": "blocks of MXFP4",
    "nanochat": "llama.cpp has no such architecture", "mellum": "not yet in gguf-py",
    "cwm": "llama.cpp has no such architecture", "vaultgemma": "llama.cpp has no such architecture",
}  # fmt: skip
# Their converters permute rows of queries and keys.
PERMUTED = (
    "arcee",
    "deepseek",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "internlm2",
    "internlm3",
    "llama",
    "ministral3",
    "mistral",
    "minicpm",
    "mixtral",
    "olmo",
    "smollm3",
    "telechat3",
)
# The part of each head that is rotated is a setting.
PARTLY_ROTATED = (
    "cohere2", "glm", "glm4", "glm4_moe", "gpt_neox", "jais2", "llama", "minimax_m2", "nemotron", "phi", "phi3",
    "qwen3_next", "solar_open", "stablelm",
)  # fmt: skip
WINDOWED = ("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "olmo3")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
LAYER_NORMS = (
    "cohere", "cohere2", "gpt_bigcode", "gpt_neox", "jais2", "nemotron", "olmo", "phi", "stablelm", "starcoder2",
)  # fmt: skip
KEYS_OF_EXPERTS = {
    "moe_k": "expert_used_count", "moe_num_experts": "expert_count", "moe_topk": "expert_used_count",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
MULTIPLIERS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
    "v_head_dim": "attention.value_length_mla", "qk_rope_head_dim": "rope.dimension_count",
    "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
}  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu")
SPACE = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
}
_ROUTER = {
    "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
}  # fmt: skip
_FIRST_DENSE = {**_ROUTER, "first_k_dense_replace": "leading_dense_block_count"}
KEYS_OF_KIND = {
    "afmoe": {
        "num_shared_experts": "expert_shared_count", "num_dense_layers": "leading_dense_block_count",
        "route_scale": "expert_weights_scale",
    },
    "deepseek": {
        "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
    },
    "llama4_text": {
        "intermediate_size": "expert_feed_forward_length", "interleave_moe_layer_step": "interleave_moe_layer_step",
        "intermediate_size_mlp": "feed_forward_length", "attn_scale": "attention.temperature_scale",
        "floor_scale": "attention.temperature_length",
    },
    "minicpm3": {key: _LATENT[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")},
    "mistral4": _LATENT | {"norm_topk_prob": "expert_weights_norm"}, "youtu": _LATENT,
    "dots1": _FIRST_DENSE, "exaone_moe": {**_FIRST_DENSE, "num_shared_experts": "expert_shared_count"},
    "solar_open": _ROUTER,
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT | {"norm_topk_prob": "expert_weights_norm"},
    "glm4_moe_lite": _LATENT | {"norm_topk_prob": "expert_weights_norm"},
    "ernie4_5_moe": {
        "moe_layer_interval": "interleave_moe_layer_step", "moe_layer_start_index": "leading_dense_block_count",
        "moe_num_shared_experts": "expert_shared_count",
    },
    "hunyuan_v1_moe": {
        "intermediate_size": "expert_feed_forward_length",
    },
    "lfm2_moe": {"num_dense_layers": "leading_dense_block_count", "conv_L_cache": "shortconv.l_cache"},
    "qwen3_next": {
        "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    },
    "glm4_moe": _FIRST_DENSE,
    "falcon_h1": SPACE,
    "granitemoehybrid": {
        **SPACE, **MULTIPLIERS, "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    "nemotron_h": {
        "conv_kernel": "ssm.conv_kernel", "ssm_state_size": "ssm.state_size", "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
    },
    "minimax_m2": {"intermediate_size": "expert_feed_forward_length"},
    "cohere": {"logit_scale": "logit_scale"}, "cohere2": {"logit_scale": "logit_scale"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    },
    "granite": MULTIPLIERS, "granitemoe": MULTIPLIERS,
}  # fmt: skip


def config_of(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, with the number of layers and the rotation."""
    c: dict[str, Any] = json.loads((folder / "config.json").read_text())
    c.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": c.get("rope_theta", 1e4)})
    if c["model_type"] == "gpt_bigcode":
        c |= {"num_hidden_layers": c["n_layer"], "hidden_size": c["n_embd"], "intermediate_size": 4 * c["n_embd"]}
        c |= {"num_attention_heads": c["n_head"], "max_position_embeddings": c["n_positions"]}
    if c["model_type"] == "lille-130m":
        c |= {"num_hidden_layers": c["n_layer"], "hidden_size": c["n_embd"], "intermediate_size": 256}
        c |= {"num_attention_heads": c["n_head"], "num_key_value_heads": c["n_kv_heads"]}
        c |= {"max_position_embeddings": c["block_size"], "rms_norm_eps": c["layer_norm_eps"]}
    c.setdefault("num_hidden_layers", len(c.get("layers_block_type", ())))
    c.setdefault("num_key_value_heads", c.get("num_attention_heads"))
    return c


def write(folder: Path, path: Path) -> None:
    """Write a folder's model as F32."""
    c = config_of(folder)
    n = c["num_hidden_layers"]
    arch = architecture(c)
    writer, names = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch]), gguf.get_tensor_name_map(arch, n)
    for key, value in settings(c).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    for name, values in stacked(parted(c, read_safetensors(folder / "model.safetensors"))).items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(
            "expert_bias", "expert_bias.bias"
        )
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            name += ".weight"
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known, name
        writer.add_tensor(known, np.ascontiguousarray(converted(c, name, values), dtype=np.float32))
    for name, values in divisors(c).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture(c: dict[str, Any]) -> gguf.MODEL_ARCH:
    """Return the architecture that llama.cpp's converter writes."""
    if "moe" in c.get("layers_block_type", ()):
        return ARCH.NEMOTRON_H_MOE
    if c["model_type"] == "granitemoehybrid" and "linear_attention" not in c["layer_types"]:
        return ARCH.GRANITE
    return ARCHITECTURES[c["model_type"]]


def settings(c: dict[str, Any]) -> dict[str, Any]:
    """Return GGUF keys, without the prefix, as llama.cpp's converters write them."""
    kind, rope = c["model_type"], c["rope_parameters"]
    if kind == "mamba2":
        return of_mamba2(c)
    rope = rope.get("full_attention", rope)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    eps = "layer_norm_epsilon" if kind in LAYER_NORMS else "layer_norm_rms_epsilon"
    made = {
        "block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"], "feed_forward_length": c.get("intermediate_size", 10_240),
        "attention.head_count": c["num_attention_heads"], "attention.head_count_kv": c["num_key_value_heads"],
        "rope.freq_base": float(rope["rope_theta"]), "vocab_size": c["vocab_size"],
        f"attention.{eps}": next((c[key] for key in EPSILONS if key in c), 1e-5),
    }  # fmt: skip
    if kind == "minicpm":
        made["embedding_scale"], made["logit_scale"] = c["scale_emb"], c["hidden_size"] / c["dim_model_base"]
        made["residual_scale"] = c["scale_depth"] / c["num_hidden_layers"] ** 0.5
    if kind == "gpt_neox":
        made["use_parallel_residual"] = c["use_parallel_residual"]
    if kind == "gpt_bigcode":
        del made["rope.freq_base"]
    if c.get("head_dim"):
        made |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    part = rope.get("partial_rotary_factor", 1)
    if kind in PARTLY_ROTATED:
        made["rope.dimension_count"] = int(head_dim * part)
    if kind in WINDOWED:
        made["attention.sliding_window"] = c["sliding_window"]
    if "layer_types" in c and kind in ("cohere2", "exaone4", "exaone_moe", "gemma3_text", "olmo3"):
        made["attention.sliding_window_pattern"] = [of == "sliding_attention" for of in c["layer_types"]]
    if kind in ("gemma2", "gemma3_text"):
        made["attention.scale"] = c["query_pre_attn_scalar"] ** -0.5
    if kind == "phi3":
        made |= {"attention.sliding_window": c["sliding_window"]}
    if kind.startswith("hunyuan_v1"):
        made["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
    if kind in ("cohere", "cohere2", "exaone_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron"):
        made["rope.scaling.type"] = "none"
    if kind in LATENT:
        made["attention.head_count_kv"] = 1
        made["attention.key_length"] = c["kv_lora_rank"] + c["qk_rope_head_dim"]
        made["attention.value_length"] = c["kv_lora_rank"]
        made["attention.key_length_mla"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        made["expert_gating_func"] = 1 if kind in ("deepseek_v2", "mistral4") else 2
    if kind == "deepseek":
        made |= {"expert_weights_scale": 1.0, "rope.scaling.type": "none", "rope.dimension_count": head_dim}
    if kind == "youtu":
        made |= {"leading_dense_block_count": c["num_hidden_layers"], "expert_shared_count": 0}
        made["expert_feed_forward_length"] = made["feed_forward_length"]
        made.pop("expert_gating_func")
    if kind == "minicpm3":
        made["attention.key_length"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        made.pop("attention.value_length")
    if kind in ("dots1", "exaone_moe", "glm4_moe", "lfm2_moe", "minimax_m2", "solar_open"):
        made["expert_gating_func"] = 2
    if kind == "ernie4_5_moe" and c["moe_num_shared_experts"]:
        made["expert_shared_feed_forward_length"] = c["intermediate_size"] // c["num_key_value_heads"]
    if kind == "exaone_moe":
        made["expert_shared_feed_forward_length"] = c["num_shared_experts"] * c["moe_intermediate_size"]
    if kind == "lfm2_moe":
        heads = [c["num_key_value_heads"] * (of == "full_attention") for of in c["layer_types"]]
        made["attention.head_count_kv"] = heads
    if kind == "granitemoehybrid" and architecture(c) == ARCH.GRANITE_HYBRID:
        made["attention.head_count_kv"] = of_some(c, "num_key_value_heads", c["layer_types"], "full_attention")
        made["ssm.inner_size"] = c["mamba_expand"] * c["hidden_size"]
        made["rope.scaling.finetuned"] = False
    if kind == "nemotron_h":
        layers = c["layers_block_type"]
        ffn, size = ("moe", "moe_intermediate_size") if "moe" in layers else ("mlp", "intermediate_size")
        made["attention.head_count_kv"] = of_some(c, "num_key_value_heads", layers, "full_attention")
        made["feed_forward_length"] = of_some(c, size, layers, ffn)
        made["ssm.inner_size"] = c["mamba_num_heads"] * c["mamba_head_dim"]
        made |= {"rope.scaling.finetuned": False, "rope.dimension_count": head_dim}
        made["attention.layer_norm_epsilon"] = c["layer_norm_epsilon"]
    if kind == "qwen3_next":
        made["ssm.inner_size"] = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        made["full_attention_interval"] = c["layer_types"].index("full_attention") + 1
    local = c["rope_parameters"].get("sliding_attention")
    if local is not None:
        made["rope.freq_base_swa"] = float(local["rope_theta"])
    made |= scaling(c, rope)
    keys = KEYS_OF_KIND.get(kind, {})
    if architecture(c) == ARCH.NEMOTRON_H_MOE:
        keys = {**_ROUTER, **keys, "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
    if kind == "granitemoehybrid" and architecture(c) == ARCH.GRANITE:
        made["feed_forward_length"], keys = c["shared_intermediate_size"], MULTIPLIERS
    for key, known in {**KEYS_OF_EXPERTS, **keys}.items():
        if c.get(key) is not None and not (architecture(c) == ARCH.NEMOTRON_H and key in KEYS_OF_EXPERTS):
            made[known] = c[key]
    return made


def of_some(c: dict[str, Any], key: str, kinds: list[str], kind: str) -> list[int]:
    """Return a setting for each layer: 0 for layers of another kind."""
    return [c[key] * (of == kind) for of in kinds]


def of_mamba2(c: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model without attention and FFN."""
    return {
        "block_count": c["num_hidden_layers"], "context_length": 1 << 20, "embedding_length": c["hidden_size"],
        "feed_forward_length": 0, "attention.head_count": 0, "vocab_size": c["vocab_size"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"], "ssm.conv_kernel": c["conv_kernel"],
        "ssm.inner_size": c["num_heads"] * c["head_dim"], "ssm.state_size": c["state_size"],
        "ssm.time_step_rank": c["num_heads"], "ssm.group_count": c["n_groups"],
    }  # fmt: skip


def scaling(c: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a rule of rotary embedding."""
    made: dict[str, Any] = {}
    if rope["rope_type"] == "yarn":
        made |= {"type": "yarn", "factor": rope["factor"], "yarn_beta_fast": rope["beta_fast"]}
        made |= {"yarn_beta_slow": rope["beta_slow"]}
        made["original_context_length"] = rope["original_max_position_embeddings"]
        if c["model_type"] == "ministral3":
            made["yarn_log_multiplier"] = rope["mscale_all_dim"]
        if c["model_type"] in LATENT:
            made["yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if rope["rope_type"] == "longrope" and c["model_type"] != "minicpm3":
        original = c["original_max_position_embeddings"]
        factor = float(np.sqrt(1 + np.log(c["max_position_embeddings"] / original) / np.log(original)))
        made |= {"original_context_length": original, "attn_factor": factor}
    found = {f"rope.scaling.{key}": value for key, value in made.items()}
    if "llama_4_scaling_beta" in rope:
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return found


def converted(c: dict[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor as llama.cpp stores it."""
    kind, parts = c["model_type"], name.split(".")
    if kind == "falcon_h1":
        values = multiplied(c, parts, values)
    if parts[-1] in ("A_log", "D") and kind in ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"):
        return (-np.exp(values) if parts[-1] == "A_log" else values)[:, None]
    if "conv1d" in parts and values.ndim == 3:
        return values[:, 0]
    if parts[-3:-1] in (["mamba", "norm"], ["mixer", "norm"]):
        return values.reshape(c["mamba_n_groups" if "mamba_n_groups" in c else "n_groups"], -1)
    if kind == "nemotron" and name.endswith("norm.weight"):
        return values + np.float32(1)
    if kind == "gpt_neox" and "query_key_value" in name:
        of_heads = values.reshape(c["num_attention_heads"], 3, -1, *values.shape[1:])
        return np.concatenate([of_heads[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])
    if kind in ("gemma", "gemma2", "gemma3_text") and values.ndim == 1:
        return values + np.float32(1)
    if kind == "qwen3_next" and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + np.float32(1)
    if name.endswith("A_log"):
        return -np.exp(values)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values[:, 0]
    if kind in PERMUTED and parts[-2] in ("q_proj", "k_proj"):
        heads = c["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"]
        return (
            values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            .swapaxes(1, 2)
            .reshape(values.shape)
        )
    return values[0] if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction.bias")) else values


def parted(c: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with fused ones in parts, under names of llama.cpp's map, as its converters write them."""
    made: dict[str, np.ndarray] = {}
    if c["model_type"] == "glm":  # files of its first implementation have queries, keys and values as one tensor
        for name in [name for name in tensors if ".q_proj." in name]:
            of_all = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            fused = name.replace("model.layers", "encoder.layers").replace(
                "self_attn.q_proj", "self_attention.query_key_value"
            )
            made[fused] = np.concatenate(of_all)
    for name, values in tensors.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "input_linear" and values.ndim == 2:  # gate and up of a dense FFN, or of the shared expert
            of_all = "shared_experts" if c["num_local_experts"] else ""
            of_layer = stem.removesuffix("shared_mlp")
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                made[f"{of_layer}mlp.{of_all}.{part}_proj.weight".replace("..", ".")] = half
        elif last == "output_linear" and values.ndim == 2 and not c["num_local_experts"]:
            made[f"{stem.removesuffix('shared_mlp')}mlp.down_proj.weight"] = values
        elif last == "input_linear":
            of_layer, half = stem.removesuffix("block_sparse_moe"), values.shape[1] // 2
            made[f"{of_layer}mlp.experts.gate_proj.weight"] = values[:, :half]
            made[f"{of_layer}mlp.experts.up_proj.weight"] = values[:, half:]
        elif c["model_type"] in ("deepseek", "llama4_text") and name.endswith("_proj") and ".experts." in name:
            values = values.swapaxes(1, 2) if c["model_type"] == "llama4_text" else values
            parts = ("down_proj",) if last == "down_proj" else ("gate_proj", "up_proj")
            for part, of in zip(parts, np.split(values, len(parts), axis=1), strict=True):
                made[f"{stem}.{part}.weight"] = of
        elif last == "in_proj_qkvz":
            groups, key, value = (c[f"linear_{of}"] for of in ("num_key_heads", "key_head_dim", "value_head_dim"))
            value *= c["linear_num_value_heads"] // groups
            of_heads = np.split(values.reshape(groups, -1, values.shape[1]), np.cumsum([key, key, value]), axis=1)
            q, k, v, z = (of.reshape(-1, values.shape[1]) for of in of_heads)
            made[f"{stem}.in_proj_qkv.weight"], made[f"{stem}.in_proj_z.weight"] = np.concatenate([q, k, v]), z
        elif name.rsplit(".", 2)[-2] in ("wqkv", "qkv_proj") and c["model_type"] in ("internlm2", "lille-130m"):
            of_layer, kind = name.rsplit(".", 3)[0], name.rsplit(".", 1)[1]
            of_layer = of_layer.replace("transformer.", "model.") + ".self_attn."
            heads, groups, rest = c["num_attention_heads"], c["num_key_value_heads"], values.shape[1:]
            n = heads // groups
            if c["model_type"] == "internlm2":
                of_groups = values.reshape(groups, n + 2, -1, *rest)
                parts = [of_groups[:, :n], of_groups[:, n], of_groups[:, n + 1]]
            else:
                parts = np.split(values.reshape(heads + 2 * groups, -1, *rest), (heads, heads + groups))
            for part, of_part in zip("qkv", parts, strict=True):
                made[f"{of_layer}{part}_proj.{kind}"] = of_part.reshape(-1, *rest)
        elif c["model_type"] == "lille-130m":
            usual = name.replace("transformer.", "model.").replace("tok_embeddings", "embed_tokens")
            usual = usual.replace("attention.norm", "input_layernorm").replace("attention.out_proj", "self_attn.o_proj")
            usual = usual.replace("feed_forward.norm", "post_attention_layernorm").replace("feed_forward.", "mlp.")
            made[usual] = values
        elif last == "kv_b_proj" and c["model_type"] != "minicpm3":
            n, heads = c["qk_nope_head_dim"], c["num_attention_heads"]
            of_each = values.reshape(heads, -1, values.shape[1])
            made[f"{stem}.k_b_proj.weight"] = of_each[:, :n].transpose(0, 2, 1)
            made[f"{stem}.v_b_proj.weight"] = of_each[:, n:]
        elif c["model_type"] == "nemotron_h" and ".experts." in name:
            made[name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")] = values
        elif c["model_type"] == "lfm2_moe" and ".experts." in name:
            part = {"w1": "gate", "w2": "down", "w3": "up"}[last]
            made[f"{stem}.{part}_proj.weight"] = values
        else:
            made[name] = values
    return made


def multiplied(c: dict[str, Any], parts: list[str], values: np.ndarray) -> np.ndarray:
    """Return a tensor of Falcon-H1 times the multipliers of muP."""
    into, (gate, down) = c["attention_in_multiplier"], c["mlp_multipliers"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": c["key_multiplier"] * into, "q_proj": into, "v_proj": into,
        "o_proj": c["attention_out_multiplier"], "out_proj": c["ssm_out_multiplier"],
        "embed_tokens": c["embedding_multiplier"], "lm_head": c["lm_head_multiplier"],
    }  # fmt: skip
    if parts[-2] != "in_proj":
        return values * np.float32(factors.get(parts[-2], 1))
    inner, width = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
    sizes = (inner, inner, width, width, c["mamba_n_heads"])
    of_rows = np.repeat(np.array(c["ssm_multipliers"], np.float32), sizes) * c["ssm_in_multiplier"]
    return values * of_rows[:, None]


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of all experts of a layer as one, under llama.cpp's merged names."""
    found: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, values in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        number, _, part = after.partition(".")
        if is_expert and number.isdigit():
            found.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        else:
            rest[name] = values
    return rest | {name: np.stack([of[e] for e in range(len(of))]) for name, of in found.items()}


def divisors(c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of divisors of rotary frequencies."""
    rope = c["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        of = {"rope_factors_long": "long_factor", "rope_factors_short": "short_factor"}
        return {f"{name}.weight": np.asarray(rope[key], np.float32) for name, key in of.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    half = (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]) // 2
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-np.arange(half) / half) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low or 1e-9), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}
