"""Make the quantised MLX folders of tests/data and their golden files with mlx-lm. The tests never run this.

Tiny Qwen3 models of random weights, quantised and written by mlx-lm, and its logits and greedy ids for them: scales and
biases are widened to float32, and mlx-lm computes in float32 on the CPU.

    python -m tests.golden.make_mlx_goldens            # all
    python -m tests.golden.make_mlx_goldens mixed      # some
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

DATA = Path(__file__).parents[1] / "data"
CONFIG = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "rope_scaling": None, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
# As in the other golden files: 1, 7 and 41 tokens.
PROMPTS, N_GREEDY, CLEAR_LEAD = (1, 7, 41), 24, 3e-3

# The type of scales, whether the head is tied, the arguments of `quantize_model`, and those of single matrices.
FP4, FP8 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}, {"group_size": 32, "bits": 8, "mode": "mxfp8"}
FOLDERS: dict[str, tuple[mx.Dtype, bool, dict[str, Any], dict[str, Any]]] = {
    "4bit": (mx.bfloat16, True, {"group_size": 64, "bits": 4}, {}),
    "mixed": (
        mx.float16, False, {"group_size": 32, "bits": 4},
        {
            "model.embed_tokens": {"group_size": 128, "bits": 8},
            "model.layers.0.self_attn.q_proj": {"group_size": 128, "bits": 8},
            "model.layers.0.self_attn.k_proj": False,
            "model.layers.0.self_attn.o_proj": {"group_size": 64, "bits": 6},
            "model.layers.0.mlp.gate_proj": {"group_size": 32, "bits": 5},
            "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 3},
            "model.layers.1.mlp.up_proj": {"group_size": 32, "bits": 2},
            "lm_head": {"group_size": 128, "bits": 8},
        },
    ),
    "floats": (
        mx.float32, False, FP4,
        {
            "model.embed_tokens": FP8,
            "model.layers.0.self_attn.q_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
            "model.layers.0.mlp.gate_proj": FP8,
            "model.layers.1.mlp.up_proj": {"group_size": 64, "bits": 4, "mode": "affine"},
            "lm_head": {"group_size": 64, "bits": 4, "mode": "affine"},
        },
    ),
}  # fmt: skip


def build(config: dict[str, Any], seed: int) -> nn.Module:
    """Return a model of random weights in which every part matters."""
    model, random = qwen3.Model(qwen3.ModelArgs.from_dict(config)), np.random.default_rng(seed)
    weights = []
    for name, parameter in tree_flatten(model.parameters()):
        if parameter.ndim == 1:
            values = random.uniform(0.5, 2.0, parameter.shape)
        else:
            small = 0.3 if name.split(".")[-2] in ("o_proj", "down_proj") else 1.0
            values = random.normal(0, 0.5 if "embed" in name else small * parameter.shape[1] ** -0.5, parameter.shape)
        weights.append((name, mx.array(values.astype(np.float32))))
    model.load_weights(weights)
    return model


def in_float32(folder: Path) -> nn.Module:
    """Load a folder with mlx-lm, and make it compute in float32."""
    loaded, _ = load_model(folder)
    model = getattr(loaded, "language_model", loaded)
    model.set_dtype(mx.float32)

    tables = [module for _, module in model.named_modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    for table in tables:

        class Embedding(type(table)):
            """An embedding that returns float32; `mx.dequantize` returns bfloat16 in the modes without biases."""

            def __call__(self, x: mx.array) -> mx.array:
                return super().__call__(x).astype(mx.float32)

        table.__class__ = Embedding
    return model


def logits_of(model: nn.Module, ids: list[int]) -> np.ndarray:
    """Return logits (T, V), without a cache."""
    logits = model(mx.array([ids]))[0]
    if logits.dtype != mx.float32:
        raise TypeError(f"computed in {logits.dtype}, not in float32")
    return np.asarray(logits)


def greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    """Return greedy ids; stop if one is nearly a tie."""
    ids = list(prompt)
    for _ in range(N_GREEDY):
        row = logits_of(model, ids)[-1]
        second, first = np.sort(row)[-2:]
        if first - second < CLEAR_LEAD * row.std():
            raise ValueError("two logits are nearly equal: choose another seed")
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


def make(name: str, seed: int) -> None:
    """Write a folder of tests/data."""
    dtype, tied, default, by_name = FOLDERS[name]
    config = {**CONFIG, "tie_word_embeddings": tied, "torch_dtype": str(dtype).removeprefix("mlx.core.")}
    folder = DATA / f"mlx-{name}"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    model = build(config, seed)
    model.set_dtype(dtype)
    model, config = quantize_model(
        model, config, default["group_size"], default["bits"], default.get("mode", "affine"),
        quant_predicate=lambda path, module: by_name.get(path, True),
    )  # fmt: skip
    for path, value in by_name.items():
        config["quantization"].setdefault(path, value)
    save_model(folder / "hf", model)
    save_config(config, folder / "hf" / "config.json")
    model, golden = in_float32(folder / "hf"), {}
    for i, length in enumerate(PROMPTS):
        prompt = np.random.default_rng(i).integers(0, config["vocab_size"], length).tolist()
        golden[f"prompt{i}"] = np.array(prompt, np.int32)
        golden[f"logits{i}"] = logits_of(model, prompt)
        golden[f"greedy{i}"] = np.array(greedy(model, prompt), np.int32)
    np.savez_compressed(folder / "golden.npz", **golden)
    print(folder.name, sum(file.stat().st_size for file in folder.rglob("*.*")) // 1024, "KB")


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for chosen in sys.argv[1:] or FOLDERS:
        for seed in range(20):
            try:
                make(chosen, seed)
                break
            except ValueError as error:
                print(chosen, seed, error)
