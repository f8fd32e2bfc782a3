"""Folders of models with published configs at reduced width and depth, and random weights.

tests/data/published-configs.json has the config.json of each model as its repository publishes it, and optionally:
"refused", the setting or the architecture that is refused and why; "reduced", sizes that `reduced` does not find
itself; "tensors", stray tensors of its files by name, with their shape or the name of the tensor that they repeat ("*"
is each layer); "recalled", true where a value was not read from a copy of the published file. A new line is a new test.
`python -m tests.published FOLDER` writes the folders; `tests/golden/compare_published.py` compares with transformers.
"""

import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.safetensors import Entry, write_safetensors
from mlx_engine.quant.types import F32
from mlx_engine.weights.model import architecture_of

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published-configs.json").read_text())
LAYERS, HEAD_DIM, VOCAB, WINDOW, EXPERTS = 2, 16, 160, 6, 4


def reduced(config, **sizes):
    """Return a config with fewer and smaller layers; the ratio of heads to key/value heads stays, and all rules."""
    if "text_config" in config:
        return {**config, "text_config": reduced(config["text_config"], **sizes)}
    if "n_embd" in config:
        small = {"n_layer": LAYERS, "n_head": 2, "n_embd": 2 * HEAD_DIM, "vocab_size": VOCAB, "n_positions": 64}
        small["n_ctx"] = small["n_positions"]
        if config.get("n_inner"):
            small["n_inner"] = 5 * HEAD_DIM
        return config | {key: value for key, value in small.items() if key in config} | sizes
    heads = config.get("num_attention_heads", 8)
    n_kv = config.get("num_key_value_heads", 4 if "gemma3" in config["model_type"] else heads)
    ratio = heads // n_kv
    heads, n_kv = (2, 2) if ratio == 1 else (ratio, 1)
    fixed = "head_dim" in config or "gemma3" in config["model_type"]
    small = {
        "num_hidden_layers": LAYERS, "num_attention_heads": heads, "hidden_size": 48 if fixed else heads * HEAD_DIM,
        "intermediate_size": 96, "vocab_size": VOCAB,
    }  # fmt: skip
    small |= {"num_key_value_heads": n_kv} if ratio > 1 or "num_key_value_heads" in config else {}
    small |= {"head_dim": HEAD_DIM} if fixed else {}
    small |= {"sliding_window": WINDOW} if config.get("sliding_window") else {}
    fewer = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "top_k_experts": 2}
    fewer |= {"num_global_key_value_heads": 1, "linear_num_key_heads": 2}
    fewer |= {
        "linear_num_value_heads": 2 * config.get("linear_num_value_heads", 1) // config.get("linear_num_key_heads", 1)
    }
    narrow = {"moe_intermediate_size": 32, "shared_intermediate_size": 96, "shared_expert_intermediate_size": 48}
    narrow |= {"global_head_dim": 2 * HEAD_DIM, "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM}
    narrow |= {"hidden_size_per_layer_input": HEAD_DIM, "vocab_size_per_layer_input": VOCAB}
    small |= {key: value for key, value in (fewer | narrow).items() if config.get(key)}
    return config | small | per_layer(config) | divisors(config) | sizes


def per_layer(config):
    """Return the settings that have a value for each layer, with those of the first layers and of the last."""
    n = config.get("num_hidden_layers") or config["num_layers"]
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == n > LAYERS}
    return {key: [*value[: LAYERS - 1], value[-1]] for key, value in lists.items()}


def divisors(config):
    """Return LongRoPE's setting with as many divisors as the reduced heads have pairs, drawn evenly from all."""
    scaling = config.get("rope_scaling") or {}
    if "long_factor" not in scaling:
        return {}
    n = int(HEAD_DIM * config.get("partial_rotary_factor", 1)) // 2
    few = {key: scaling[key][:: len(scaling[key]) // n][:n] for key in ("long_factor", "short_factor")}
    return {"rope_scaling": scaling | few}


def write_folder(folder, entry):
    """Write the folder of an entry of the file: config.json, and weights by the plan of its model file."""
    config = entry["config"] if "refused" in entry else reduced(entry["config"], **entry.get("reduced", {}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # A setting is refused before any tensor is looked at.
    tensors = {"any": np.zeros(1, np.float32)} if "refused" in entry else weights(config, entry.get("tensors", {}))
    entries = [Entry(name, values.shape, F32) for name, values in tensors.items()]
    write_safetensors(folder / "model.safetensors", entries, [v.view(np.uint8).reshape(-1) for v in tensors.values()])
    return folder


def weights(config, stray):
    """Return random values of the tensors that the model file plans, and of stray ones."""
    draft = Checkpoint("published", "hf", config["model_type"], config, {}, {}, None)
    plan, made = architecture_of(draft).plan(draft), {}
    for tensor in plan.tensors:
        stored = tensor.stored("hf")
        if tensor.required and stored.name not in made:
            made[stored.name] = values(stored.name, stored.shape(tensor.shape), norm_offset=stored.plus)
            if "gemma4" in config["model_type"] and stored.name.endswith("q_norm.weight"):
                # Attention scores of Gemma 4 have the scale 1: the norms of queries make up for the head dim.
                made[stored.name] *= np.float32(tensor.shape[0] ** -0.5)
    for name, like in stray.items():
        for i in range(plan.config.n_layers if "*" in name else 1):
            shape = like if isinstance(like, list) else None
            made[name.replace("*", str(i))] = made[like] if shape is None else np.zeros(shape, np.float32)
    return made


def values(name, shape, *, norm_offset):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) == 1:
        mean = 1.0 - norm_offset if name.endswith(("weight", "scale", "scalar")) else 0.0
        return (mean + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    return (rng.standard_normal(shape) / math.sqrt(min(shape[-2:]))).astype(np.float32)


if __name__ == "__main__":
    for published, of in PUBLISHED.items():
        print(write_folder(Path(sys.argv[1]) / published.replace("/", "--"), of))
