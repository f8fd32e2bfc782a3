"""Convert a safetensors folder to a GGUF file, as llama.cpp's converter does.

Written with the gguf package and from llama.cpp's conventions alone: Conv1D turned round but q, k, v left together,
1 added to Gemma's norm weights, the rows of Llama's q and k dealt out. It shares no line with mlx_engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GEMMA3 = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LFM2 = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
QWEN3_5 = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn": "",  # A_log and dt_bias
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QWEN3 = {**LLAMA, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp"}
SHARED_EXPERT = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
MIXTRAL = {**LLAMA, "block_sparse_moe.gate": "ffn_gate_inp"}
# The parts of an expert, which GGUF stacks.
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
NAMES = {
    "gpt2": GPT2,
    "gemma2": GEMMA3,
    "gemma3_text": GEMMA3,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen2_moe": {**LLAMA, **SHARED_EXPERT},
    "qwen3_moe": QWEN3,
    "mixtral": MIXTRAL,
    "lfm2": LFM2,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": {**QWEN3_5, **SHARED_EXPERT},
}
# Values of config.json's model_type that have another name in GGUF.
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
# Matrices that are never quantised.
FLOATS = ("position_embd", "shortconv.conv", "ssm_conv1d", "ffn_gate_inp")


def convert(folder: Path, path: Path, type_: str) -> None:
    """Write `path` with matrices of `type_`, "F32" or "Q8_0"; learned positions stay F32."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(kind, kind))
    {
        "gpt2": _gpt2_settings,
        "lfm2": _lfm2_settings,
        "qwen3_5_text": _qwen3_5_settings,
        "qwen3_5_moe_text": _qwen3_5_settings,
    }.get(kind, _settings)(writer, config)
    for name, values in stacked(read_safetensors(folder / "model.safetensors")).items():
        *stem, part = name.split(".")
        layer = [f"blk.{stem[2]}"] if stem[1:2] in (["h"], ["layers"]) else []
        known = f"ffn_{stem[-1]}_exps" if "experts" in stem else NAMES[kind][".".join(stem[3:] if layer else stem)]
        if kind == "gpt2" and layer and values.ndim == 2:
            values = values.T
        if kind in ("gemma2", "gemma3_text") and values.ndim == 1:
            values = values + np.float32(1)
        if kind in ("llama", "mistral", "mixtral") and known in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if known == "attn_q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if kind.startswith("qwen3_5"):
            known, part, values = _qwen3_5_tensor(config, known, part, values)
        if known == "ffn_gate_inp_shexp":
            values = values[0]
        if values.ndim == 3 and "conv" in known:
            values = values[:, 0]
        _add(writer, ".".join(filter(None, [*layer, known, part])), values, type_)
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of all experts of a layer as one, "... .experts.gate.weight"."""
    found: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, values in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, part, _ = after.split(".")
            found.setdefault(f"{before}.experts.{EXPERTS[part]}.weight", {})[int(number)] = values
        else:
            rest[name] = values
    return rest | {name: np.stack([of[e] for e in range(len(of))]) for name, of in found.items()}


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, type_: str) -> None:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type_ == "F32" or values.ndim < 2 or any(of in name for of in FLOATS):
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[type_]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _gpt2_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _settings(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    if config["model_type"] in ("llama", "qwen2"):
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
        return
    if config["model_type"] == "lfm2":
        return
    _expert_settings(writer, config)
    if config["model_type"] == "qwen2_moe":
        return
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if config["model_type"] in ("mistral", "mixtral", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"):
        return
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    # Real files leave this key out, because it follows from their sizes.
    writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)


def _expert_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    if "num_experts_per_tok" not in config:
        return
    writer.add_expert_count(config["num_local_experts" if "num_local_experts" in config else "num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _lfm2_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    kv = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in config["layer_types"]]
    _settings(writer, {**config, "num_key_value_heads": kv, "rms_norm_eps": config["norm_eps"]})
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _qwen3_5_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    _settings(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _qwen3_5_tensor(config: dict, known: str, part: str, values: np.ndarray) -> tuple[str, str, np.ndarray]:
    """Deal out the value heads among the key heads, from (key head, value head) to (value head, key head)."""
    n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * n_keys * config["linear_key_head_dim"]

    def dealt(heads: np.ndarray) -> np.ndarray:
        return heads.reshape(n_keys, n_values // n_keys, -1).swapaxes(0, 1).reshape(heads.shape)

    if part == "A_log":
        return "ssm_a", "", dealt(-np.exp(values))
    if part == "dt_bias":
        return "ssm_dt", "bias", dealt(values)
    if known in ("attn_gate", "ssm_alpha", "ssm_beta"):
        values = dealt(values)
    elif known in ("attn_qkv", "ssm_conv1d"):
        values = np.concatenate((values[:keys], dealt(values[keys:])))
    elif known == "ssm_out":
        values = dealt(values.T).T
    elif known.endswith("norm") and known != "ssm_norm":
        values = values + np.float32(1)
    return known, part, values


def _llama3_factors(config: dict) -> np.ndarray:
    """Return the divisor of each RoPE frequency."""
    rope, half = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"] // 2
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(half) / half)
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors by name: floats as float32, integers as they are."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)

    def values(row: dict) -> np.ndarray:
        kind = {"F32": "<f4", "BF16": "<u2", "U8": "u1"}[row["dtype"]]
        found = np.frombuffer(data[start:][slice(*row["data_offsets"])], kind).reshape(row["shape"])
        return (found.astype(np.uint32) << 16).view(np.float32) if row["dtype"] == "BF16" else found

    return {name: values(row) for name, row in header.items()}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Tensors by name: floats as float32, integers as they are."""
    header, blob = {}, b""
    for name, values in tensors.items():
        kind = {"uint8": "U8", "uint32": "U32"}.get(values.dtype.name, "F32")
        data = np.ascontiguousarray(values, dtype="<f4" if kind == "F32" else values.dtype).tobytes()
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)
