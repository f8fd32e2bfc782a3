"""Write config.json so that mlx-lm reads from it what transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The kinds of layers with rotary settings of their own.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Architectures whose nested settings mlx-lm reads.
NESTED = ("ministral3",)
# Architectures whose kinds of layers have one base, and that have no key for a second.
ONE_BASE = ("olmo3",)
# Keys of nested settings that mlx-lm reads beside `rope_scaling`.
BESIDE = ("partial_rotary_factor", "original_max_position_embeddings")


def config_for_mlx(config: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    """Return a config that does not rely on defaults in which mlx-lm and transformers differ.

    `tie_word_embeddings` is written out: for Llama the defaults are opposite. transformers 5 nests the rotary settings
    in `rope_parameters`, which most of mlx-lm 0.32 does not read: Llama's base would be 10,000 without a word. They are
    written as transformers 4 did.

    Args:
        config: config.json of the original folder.
        has_head: whether the folder has a matrix for the head.
    """
    made = {**config, "tie_word_embeddings": not has_head}
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
