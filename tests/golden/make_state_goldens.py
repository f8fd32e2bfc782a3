"""Make the LFM2, Qwen3.5 and Qwen3.5-MoE checkpoints of tests/data and their golden files. The tests never run this.

Tiny models with random weights: an LFM2 of two convolutions and a layer of attention between them; a Qwen3.5 of three
gated delta nets and a layer of attention, with two value heads for each key head; a Qwen3.5-MoE of one delta net and a
layer of attention, which uses two of five experts. Computed as in `make_llama_goldens.py`, in float64.

    python -m tests.golden.make_state_goldens            # all
    python -m tests.golden.make_state_goldens lfm2       # some
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import Lfm2Config, PreTrainedModel, Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from transformers import modeling_rope_utils as rope_utils
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from tests.golden.make_goldens import DATA, DoubleTorch, greedy, logits_of
from tests.golden.make_llama_goldens import clear_choices, to_q8_0

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "attn_implementation": "eager", "tie_word_embeddings": True,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
PARTIAL = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}  # fmt: skip
# A prompt shorter than the convolutions, some of a few tokens, and one of more than two chunks of 64.
PROMPTS, LONG = (1, 7, 41), 135
# The class, its settings, and a seed for which no greedy step is nearly a tie.
MODELS = {
    "lfm2": (
        modeling_lfm2.Lfm2ForCausalLM,
        Lfm2Config(
            **{**SIZES, "hidden_size": 64}, num_hidden_layers=3, intermediate_size=64, block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention", "conv"], rope_parameters=PLAIN,
        ), 1,
    ),
    "qwen3_5": (
        modeling_qwen3_5.Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SIZES, num_hidden_layers=4, intermediate_size=64, head_dim=32, linear_key_head_dim=16,
            linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, rope_parameters=PARTIAL,
        ), 1,
    ),
    "qwen3_5moe": (
        modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(
            **SIZES, num_hidden_layers=2, head_dim=32,
            layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=16, linear_value_head_dim=32,
            rope_parameters=PARTIAL, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, experts_implementation="eager",
        ), 3,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """Set random weights for which every part matters."""
    of, config, seed = MODELS[name]
    made: PreTrainedModel = of(config)
    random = np.random.default_rng(seed)
    for stem, parameter in made.named_parameters():
        if stem.endswith("A_log"):
            values = random.uniform(-4.0, 0.5, parameter.shape)
        elif stem.endswith("dt_bias"):
            values = random.normal(0, 0.5, parameter.shape)
        elif parameter.ndim == 1:
            centred = name != "lfm2" and "linear_attn" not in stem
            values = random.uniform(0.5, 2.0, parameter.shape) - centred
        elif parameter.ndim == 3 and "conv" in stem:
            values = random.normal(0, 0.7, parameter.shape)
        else:
            # The output of a layer is small, so that rounding errors do not grow from layer to layer.
            small = 0.3 if {"o_proj", "out_proj", "down_proj", "w2"} & set(stem.split(".")) else 1.0
            values = random.normal(0, 0.5 if "embed" in stem else small * parameter.shape[-1] ** -0.5, parameter.shape)
        # Rounded to float32, so that the file has exactly the weights of the computation.
        parameter.data = torch.from_numpy(values.astype(np.float32).astype(np.float64))
    return made.eval()


def make(name: str) -> None:
    """Write a folder of tests/data."""
    seed = MODELS[name][2]
    folder = DATA / f"{name}-micro"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    random, golden = np.random.default_rng(seed + 1000), {}
    lengths = PROMPTS if name == "qwen3_5moe" else (*PROMPTS, LONG)
    prompts = [random.integers(0, SIZES["vocab_size"], n).tolist() for n in lengths]
    with ExitStack() as stack:
        for module in (modeling_lfm2, modeling_qwen3_5, modeling_qwen3_5_moe, rope_utils):
            stack.enter_context(mock.patch.object(module, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        model = build(name)
        stored = {stem: values.to(torch.float32) for stem, values in model.state_dict().items()}
        stored.pop("lm_head.weight")
        model.save_pretrained(folder / "hf", state_dict=stored)
        for suffix in ("", "_q8"):
            if suffix:
                to_q8_0(model)
            stack.enter_context(clear_choices(model))
            for i, prompt in enumerate(prompts):
                golden[f"prompt{i}"] = np.array(prompt, np.int32)
                golden[f"logits{i}{suffix}"] = logits_of(model, prompt).astype(np.float32)
                golden[f"greedy{i}{suffix}"] = np.array(greedy(model, prompt), np.int32)
    np.savez_compressed(folder / "golden.npz", **golden)
    Path(folder / "hf" / "generation_config.json").unlink(missing_ok=True)
    print(folder.name, {key: values.shape for key, values in golden.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or MODELS:
        make(chosen)
