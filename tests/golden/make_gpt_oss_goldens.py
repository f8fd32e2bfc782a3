"""Make the checkpoint of gpt-oss in tests/data and its golden files. The tests never run this.

A tiny model with random weights: experts in MXFP4, all other tensors in bfloat16, a window of 8 in every second layer,
sinks of the size of scores, gates and ups of which some are clamped, and limits of YaRN that lie between two pairs.
Computed as in `make_llama_goldens.py`, in float64; `_q8` is for matrices after a round trip through Q8_0.

    python -m tests.golden.make_gpt_oss_goldens
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from unittest import mock

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, PreTrainedModel
from transformers import modeling_rope_utils as rope_utils
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.golden.make_goldens import DATA, DoubleTorch, greedy, logits_of
from tests.golden.make_llama_goldens import clear_choices

VOCAB, SEEDS, PROMPTS = 64, range(100), (5, 41)
CONFIG = GptOssConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=VOCAB, max_position_embeddings=512, num_local_experts=5, num_experts_per_tok=2,
    sliding_window=8, bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
    experts_implementation="eager", rope_parameters={
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
    },
)  # fmt: skip
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = ("gate_up_proj", "down_proj")


def build(seed: int) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Return a model with random weights for which every part matters, and its tensors as they are stored."""
    made, random, stored = modeling_gpt_oss.GptOssForCausalLM(CONFIG), np.random.default_rng(seed), {}
    for name, parameter in made.named_parameters():
        if name.endswith(EXPERTS):
            x, k, n = parameter.shape
            blocks = random.integers(0, 256, (x, n, k // 32, 16), dtype=np.uint8)
            # Levels have a mean size of 2.9. Larger gates and ups, of which the limit is 7.
            size = 2.0 if "gate_up" in name else 0.3
            scales = 127 + np.floor(np.log2(size * k**-0.5 / 2.9)) + random.integers(0, 2, blocks.shape[:-1])
            stored[f"{name}_blocks"] = torch.from_numpy(blocks)
            stored[f"{name}_scales"] = torch.from_numpy(scales.astype(np.uint8))
            parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            parameter.data = convert_moe_packed_tensors(*parts, dtype=torch.float64)
            continue
        if "norm" in name:
            values = random.uniform(0.5, 2.0, parameter.shape)
        elif parameter.ndim == 1 or name.endswith("bias"):
            values = random.normal(0, 0.5, parameter.shape)
        else:
            small = 0.3 if "o_proj" in name else 1.0
            values = random.normal(0, 0.5 if "embed" in name else small * parameter.shape[1] ** -0.5, parameter.shape)
        stored[name] = torch.from_numpy(values).to(torch.bfloat16)
        parameter.data = stored[name].to(torch.float64)
    return made.eval(), stored


def to_q8_0(model: PreTrainedModel) -> None:
    """Replace the matrices by their Q8_0 roundings, except routers; those of experts are stored transposed."""
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        is_expert = name.endswith(EXPERTS)
        if is_expert or (parameter.ndim == 2 and name.endswith("weight") and "router" not in name):
            values = parameter.detach().numpy().astype(np.float32)
            values = np.ascontiguousarray(values.swapaxes(1, 2)) if is_expert else values
            rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).astype(np.float64)
            parameter.data = torch.from_numpy(rounded.swapaxes(1, 2) if is_expert else rounded)


def computed(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Return the stored tensors and the results."""
    random, golden = np.random.default_rng(seed + 1000), {}
    prompts = [random.integers(0, VOCAB, n).tolist() for n in PROMPTS]
    with ExitStack() as stack:
        for module in (modeling_gpt_oss, rope_utils):
            stack.enter_context(mock.patch.object(module, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        model, stored = build(seed)
        stack.enter_context(clear_choices(model))
        for suffix in ("", "_q8"):
            if suffix:
                to_q8_0(model)
            for i, prompt in enumerate(prompts):
                golden[f"prompt{i}"] = np.array(prompt, np.int32)
                golden[f"logits{i}{suffix}"] = logits_of(model, prompt).astype(np.float32)
                golden[f"greedy{i}{suffix}"] = np.array(greedy(model, prompt), np.int32)
    return stored, golden


def make() -> None:
    """Write a folder of tests/data, with the first seed for which no choice is nearly a tie."""
    folder = DATA / "gptoss-micro"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        try:
            stored, golden = computed(seed)
            break
        except (ValueError, SystemExit) as error:
            print(seed, error)
    save_file(stored, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    settings = {**CONFIG.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": QUANTIZATION}
    (folder / "hf" / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    np.savez_compressed(folder / "golden.npz", **golden)
    print(folder.name, seed, {key: values.shape for key, values in golden.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
