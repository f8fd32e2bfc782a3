"""Write config.json so that mlx-lm reads from it what transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The kinds of layers with rotary settings of their own.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Architectures that mlx-lm has only as the text model of another one, by the names of transformers.
INNER = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
GEMMA4 = ("gemma4", "gemma4_text")
# Architectures whose nested settings mlx-lm reads.
NESTED = ("ministral3", *INNER, *INNER.values(), *GEMMA4)
# Architectures whose number of tokens mlx-lm reads beside `text_config`.
SIZE_OUTSIDE = ("gemma3", "gemma4")
# Rotary settings as transformers 4 has them.
ROTARY = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
# Architectures whose kinds of layers have one base, and that have no key for a second.
ONE_BASE = ("olmo3",)
# Keys of nested settings that mlx-lm reads beside `rope_scaling`.
BESIDE = ("partial_rotary_factor", "original_max_position_embeddings")


def config_for_mlx(
    config: Mapping[str, Any], *, has_head: bool, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config that does not rely on defaults in which mlx-lm and transformers differ.

    `tie_word_embeddings` is written out: for Llama the defaults are opposite. transformers 5 nests the rotary settings
    in `rope_parameters`, which most of mlx-lm 0.32 does not read: Llama's base would be 10,000 without a word. They are
    written as transformers 4 did. In a model that also reads images, these are settings of the text model.

    Args:
        config: config.json of the original folder.
        has_head: whether the folder has a matrix for the head.
        known: the settings of the text model as they were read, `Declared.to_hf`; the config may lack some of them.
    """
    text, known = config.get("text_config"), known or {}
    if isinstance(text, Mapping):
        made = {**config, "text_config": _text_model(text, known, has_head=has_head)}
        is_outer = made.get("model_type") in SIZE_OUTSIDE and "vocab_size" in known
        return made | ({"vocab_size": known["vocab_size"]} if is_outer else {})
    made = _text_model(config, known, has_head=has_head)
    return made | ({"model_type": INNER[made["model_type"]]} if made.get("model_type") in INNER else {})


def _text_model(config: Mapping[str, Any], known: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    made = _named_as_published({**config, "tie_word_embeddings": not has_head})
    missing = {key: value for key, value in known.items() if made.get(key) is None and value is not None}
    if not ROTARY.isdisjoint(made):
        missing.pop("rope_parameters", None)
    made = _completed(made | missing)
    if made.get("model_type") in NESTED:
        return made
    nested = made.pop("rope_parameters", None)
    if not isinstance(nested, Mapping):
        return made
    of_all = nested.get(GLOBAL, nested)
    local = nested.get(LOCAL)
    made["rope_theta"] = of_all.get("rope_theta", made.get("rope_theta"))
    if local is not None and not (made.get("model_type") in ONE_BASE and local["rope_theta"] == made["rope_theta"]):
        made["rope_local_base_freq"] = local["rope_theta"]
    rule = of_all.get("rope_type", "default")
    made["rope_scaling"] = None if rule == "default" else {k: v for k, v in of_all.items() if k != "rope_theta"}
    if rule == "longrope":
        made |= {key: of_all[key] for key in BESIDE if key in of_all}
        made["rope_scaling"] |= {"type": rule}
    return {key: value for key, value in made.items() if value is not None or key == "rope_scaling"}


def _named_as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the names that its repository publishes, where transformers 5 saves others."""
    if config.get("model_type") == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config.get("model_type") == "granitemoehybrid" and "layer_types" in config:
        config["layer_types"] = ["attention" if kind == GLOBAL else kind for kind in config["layer_types"]]
    if config.get("model_type") in INNER:
        config["model_type"] = INNER[config["model_type"]]
    kinds = config.get("layer_types") or ()
    if config.get("model_type") in INNER.values() and GLOBAL in kinds:
        config.setdefault("full_attention_interval", kinds.index(GLOBAL) + 1)
    sizes = config.pop("per_layer_config", None)
    if config.get("model_type") == "gemma4_text" and sizes is not None:
        of_global = sizes.get(str(config["num_hidden_layers"] - 1), {})  # the last layer is global
        for key, name in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
            config[name] = of_global.get(key, config.get(key))
    if config.get("model_type") == "lfm2" and "hidden_size" in config:
        config.setdefault("block_dim", config["hidden_size"])
    return config


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys that mlx-lm requires beside those that transformers reads."""
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        config.setdefault("n_ctx", config["n_positions"])
    if config.get("model_type") in GEMMA4 and "vocab_size" in config:
        config.setdefault("vocab_size_per_layer_input", config["vocab_size"])
    return config
