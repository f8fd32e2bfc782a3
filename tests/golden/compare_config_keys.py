"""Compare tests/data/config-keys.json with transformers: `python -m tests.golden.compare_config_keys [TYPE ...]`.

Needs torch and transformers. For each `model_type`, every key of its configuration class must be listed. A small model
with random weights computes logits in float64 with the listed sizes, and again with each listed value: a key listed as
harmless must leave them as they are; a key listed as read, and a value listed as refused, must change them, or need
weights of other shapes. Prints a line for each contradiction and exits with 1 if there is one.

    python -m tests.golden.compare_config_keys --write TYPE    # add the keys of a new type, to be checked by hand
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.utils import logging

from mlx_engine.errors import ModelError
from tests.unit.test_config_keys import KEYS, PATH, decided

# transformers has it as a part of Mistral 3 alone.
AutoModelForCausalLM.register(CONFIG_MAPPING["mistral4"], Mistral4ForCausalLM, exist_ok=True)
EAGER = {
    "attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
IDS = torch.tensor([[3, 1, 7, 9, 2, 30, 11, 5, 8, 21, 17, 4]])
# Read for something else than logits, or overruled by another key of the sizes, or read by other programs alone.
WITHOUT_EFFECT = {
    "max_position_embeddings", "n_positions", "tie_word_embeddings", "use_sliding_window", "use_double_wide_mlp",
    "intermediate_size", "use_bidirectional_attention", "attn_logit_softcapping", "swiglu_limit", "hidden_act",
    "time_step_limit", "sliding_window",
}  # fmt: skip
# Results differ by the rounding of transformers' own casts to float32.
ROUNDED = {"chunk_size", "mamba_chunk_size", "residual_in_fp32"}
# The keys of every class, which change no logits: names, versions, and what `generate` and training do.
BASE = {*PreTrainedConfig().to_dict(), "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "tokenizer_class"}


# Values that `others` does not find.
OTHERS: dict[str, list[Any]] = {
    "activation_function": ["gelu", "relu"], "audio_config": [{"hidden_size": 8}, None],
    "final_logit_softcapping": [0.5],
    "full_attn_idxs": [[0]], "hidden_act": ["gelu"], "hidden_activation": ["silu"], "layer_types": [["invented"] * 4],
    "mlp_multipliers": [[2.0, 0.5]], "mlp_only_layers": [[0]], "no_rope_layers": [[1, 0, 1, 0]],
    "layers_block_type": [["invented"] * 4], "mlp_hidden_act": ["gelu"], "mamba_hidden_act": ["gelu"],
    "mtp_layers_block_type": [["moe"]], "position_embedding_type": ["nope"],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 50.0}, {"rope_type": "invented", "rope_theta": 1e4}],
    "ssm_multipliers": [[2.0, 0.5, 3.0, 2.0, 0.5]], "summary_activation": ["tanh"], "summary_type": ["mean"],
    "time_step_limit": [[0.0, 1.0]],
    "use_bidirectional_attention": [True, "all"], "vision_config": [{"hidden_size": 8}],
}  # fmt: skip


def build(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Return a model with the default weights of a class, in float64."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**EAGER | settings)).double().eval()


def logits(model: PreTrainedModel) -> np.ndarray:
    """Return logits (T, V) of a few tokens."""
    with torch.no_grad():
        return np.asarray(model(IDS).logits[0].numpy())


class Truth:
    """A model with random weights, and whether a setting changes what it computes."""

    def __init__(self, kind: str, sizes: dict[str, Any]) -> None:
        self.kind, self.sizes = kind, sizes
        model, random = build(kind, copy.deepcopy(sizes)), np.random.default_rng(1)
        for name, parameter in model.named_parameters():
            mean = 1 if parameter.ndim == 1 and "norm" in name else 0
            parameter.data = torch.from_numpy(random.normal(mean, 0.3, parameter.shape))
        self.weights = {name: values.clone() for name, values in model.state_dict().items()}
        self.logits = logits(model)

    def changes(self, key: str, value: object) -> bool | None:
        """Return whether a value changes the logits, or needs other weights; None if transformers refuses it too."""
        try:
            model = build(self.kind, copy.deepcopy({**self.sizes, key: value}))
        except Exception:  # of any class: by validation, or by what the value breaks
            return None
        try:
            model.load_state_dict(self.weights)
        except RuntimeError:
            return True
        try:
            return not np.allclose(logits(model), self.logits, rtol=1e-9, atol=1e-12)
        except Exception:  # such as a cast to float32 beside float64
            return None


def contradictions(kind: str, of: dict[str, Any]) -> list[str]:
    """Return what is wrong with the list of a type."""
    truth = None if "text_config" in of["sizes"] else Truth(kind, of["sizes"])
    listed = {*of["read"], *of["refused"], *of["harmless"]}
    found = [
        f"{key} is not listed"
        for key in CONFIG_MAPPING[kind]().to_dict()
        if key not in listed | BASE | set(KEYS["everywhere"])
    ]
    if truth is None:  # its text model is a type of its own
        return found
    for key, values in of["harmless"].items():
        found += [
            f"{key}={value!r} changes the logits"
            for value in values
            if key not in ROUNDED and truth.changes(key, value)
        ]
    for key, value in of["read"].items():
        if key not in WITHOUT_EFFECT and truth.changes(key, value) is False:
            found.append(f"{key}={value!r} is read and changes nothing")
    for key, values in of["refused"].items():
        if key not in WITHOUT_EFFECT:
            same = [value for value in values if truth.changes(key, value) is False]
            found += [f"{key}={value!r} is refused and changes nothing" for value in same]
    return found


def others(key: str, value: Any) -> list[Any]:
    """Return other values of a setting."""
    if key in OTHERS or value is None:
        return OTHERS.get(key, [2])
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 if value else 2, value + 1]
    return [value * 2 if value else 0.5] if isinstance(value, float) else [2]


def draft(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what the reader says of other values of each key."""
    made: dict[str, Any] = {"sizes": sizes, "read": {}, "refused": {}, "harmless": {}}
    for key, value in CONFIG_MAPPING[kind](**copy.deepcopy(sizes)).to_dict().items():
        for other in others(key, value) if key not in BASE | set(KEYS["everywhere"]) else ():
            try:
                verdict = "read" if decided(kind, sizes, key, other) else "harmless"
            except ModelError as error:
                # A number of layers may disagree with the list of their kinds.
                verdict = "refused" if key in str(error) else "read"
            if verdict == "read":
                made["read"].setdefault(key, other)
            elif key not in made["read"]:
                made[verdict].setdefault(key, []).append(other)
    for key in made["read"]:
        made["refused"].pop(key, None)
    return made


def main(arguments: list[str]) -> int:
    """Print the contradictions; return the exit code."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if arguments[:1] == ["--write"]:
        for kind in arguments[1:]:
            KEYS["types"][kind] = draft(kind, KEYS["types"].get(kind, KEYS["types"]["llama"])["sizes"])
        written(KEYS)
        return 0
    found = [
        f"{kind}: {line}" for kind in arguments or KEYS["types"] for line in contradictions(kind, KEYS["types"][kind])
    ]
    print(*found, sep="\n")
    return min(len(found), 1)


def written(keys: dict[str, Any], path: Path = PATH) -> None:
    """Write the list with one line for each part of a type."""
    types = ",\n".join(
        f"  {json.dumps(kind)}: {{\n"
        + ",\n".join(f"   {json.dumps(part)}: {json.dumps(of[part])}" for part in of)
        + "}"
        for kind, of in keys["types"].items()
    )
    around = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in keys.items() if key != "types")
    path.write_text(f'{{\n{around},\n "types": {{\n{types}}}}}\n')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
