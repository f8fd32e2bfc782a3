"""Make the checkpoints of Llama, Qwen2, Mistral, Gemma 2 and two mixtures of experts, and their golden files.

The tests never run this. Tiny models with random weights: a Llama 3 whose context is longer than that of its training,
with a head of its own; a Qwen2 with biases and a tied head; a Mistral without a window, whose heads are together twice
as wide as the model; a Gemma 2 with a window of 8 in every second layer, and soft caps that most scores and logits come
near to; a Qwen2-MoE with a shared expert, a Qwen3-MoE that uses three of eight experts, and a Mixtral that uses two of
four. Computed as in `make_goldens.py`, in float64; `_q8` is for matrices after a round trip through Q8_0.

    python -m tests.golden.make_llama_goldens            # all
    python -m tests.golden.make_llama_goldens mistral    # some
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers import modeling_rope_utils as rope_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.golden.make_goldens import DATA, DoubleTorch, greedy, logits_of

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
FEW = {"intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "experts_implementation": "eager"}
MOE_SIZES = {**SIZES, **FEW, "hidden_size": 32, "head_dim": 16}
# A short context, so that all three kinds of frequencies occur and their difference is visible within a prompt.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
SHORT = {"rope_type": "default", "rope_theta": 1e4}
# The attention scale is neither that of the head dim nor that of the 27B model.
GEMMA2 = {
    "intermediate_size": 32, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0,
}  # fmt: skip
PROMPTS = (1, 7, 41)
# The least lead of an expert that is chosen over one that is not, as a share of the spread of the router's logits.
CLEAR_CHOICE = 1e-4
# The names of tensors that are not quantised, at their ends.
FLOATS = (
    "mlp.gate.weight", "router.gate.weight", "mixer.gate.weight", "feed_forward.gate.weight", "gate.wg.weight",
    "moe.router.weight", "feed_forward.router.weight", "router.proj.weight", "kv_b_proj.weight",
    "shared_expert_gate.weight", "e_score_correction_bias", "conv1d.weight", "conv.conv.weight", "wpe.weight",
)  # fmt: skip
# The class, its settings, and a seed for which no greedy step is nearly a tie.
MODELS = {
    "llama": (modeling_llama.LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5), 1),
    "qwen2": (
        modeling_qwen2.Qwen2ForCausalLM, Qwen2Config(**SIZES, rope_parameters=PLAIN, tie_word_embeddings=True), 1,
    ),
    "mistral": (
        modeling_mistral.MistralForCausalLM,
        MistralConfig(**SIZES, rope_parameters=PLAIN, head_dim=32, sliding_window=None, rms_norm_eps=1e-5), 2,
    ),
    "gemma2": (modeling_gemma2.Gemma2ForCausalLM, Gemma2Config(**{**SIZES, **GEMMA2}, rope_parameters=SHORT), 1),
    "qwen2moe": (
        modeling_qwen2_moe.Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES | FEW, rope_parameters=PLAIN, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ), 5,
    ),
    "qwen3moe": (
        modeling_qwen3_moe.Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **MOE_SIZES, rope_parameters=PLAIN, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
            norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
        ), 5,
    ),
    "mixtral": (
        modeling_mixtral.MixtralForCausalLM,
        MixtralConfig(
            **{**MOE_SIZES, "intermediate_size": 64}, rope_parameters=PLAIN, num_local_experts=4, num_experts_per_tok=2,
        ), 7,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """Set random weights for which every part matters."""
    of, config, seed = MODELS[name]
    made: PreTrainedModel = of(config)
    random = np.random.default_rng(seed)
    for stem, parameter in made.named_parameters():
        if stem.endswith("bias"):
            values = random.normal(0, 0.5, parameter.shape)
        elif parameter.ndim == 1:
            # Gemma stores norm weights minus 1.
            values = random.uniform(0.5, 2.0, parameter.shape) - (name == "gemma2")
        else:
            # The output of a layer is small, so that rounding errors do not grow from layer to layer.
            small = 0.3 if {"o_proj", "down_proj"} & set(stem.split(".")) else 1.0
            scale = 0.5 if "embed" in stem else small * parameter.shape[-1] ** -0.5
            values = random.normal(0, scale, parameter.shape)
        # Rounded to float32, so that the file has exactly the weights of the computation.
        parameter.data = torch.from_numpy(values.astype(np.float32).astype(np.float64))
    return made.eval()


@contextmanager
def clear_choices(model: PreTrainedModel) -> Iterator[None]:
    """Stop if a router of the model chooses between two experts that are nearly a tie."""

    def check(_router: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        # Llama 4's routers return scores and logits, and a token chooses one expert.
        logits, chosen = (output[1], 1) if len(output) == 2 else (output[0], output[2].shape[-1])
        top = logits.sort(dim=-1, descending=True).values
        lead = ((top[:, chosen - 1] - top[:, chosen]) / (top[:, 0] - top[:, -1])).min().item()
        if lead < CLEAR_CHOICE:
            raise ValueError(f"an expert leads by {lead:.1e} of the spread of the logits; choose another seed")

    routers = [module for module in model.modules() if type(module).__name__.endswith(("Router", "Gate"))]
    hooks = [router.register_forward_hook(check) for router in routers]
    yield
    for hook in hooks:
        hook.remove()


def to_q8_0(model: PreTrainedModel) -> None:
    """Replace the matrices by their Q8_0 roundings, except routers; convolutions are no matrices."""
    kind = gguf.GGMLQuantizationType.Q8_0
    for stem, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not stem.endswith(FLOATS):
            is_transposed = "feed_forward.experts." in stem  # Llama 4
            values = parameter.detach().numpy().astype(np.float32)
            blocks = gguf.quants.quantize(values.swapaxes(-1, -2) if is_transposed else values, kind)
            rounded = gguf.quants.dequantize(blocks, kind).astype(np.float64)
            parameter.data = torch.from_numpy(rounded.swapaxes(-1, -2) if is_transposed else rounded)


def make(name: str) -> None:
    """Write a folder of tests/data."""
    seed = MODELS[name][2]
    folder = DATA / f"{name}-micro"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    random, golden = np.random.default_rng(seed + 1000), {}
    prompts = [random.integers(0, MODELS[name][1].vocab_size, n).tolist() for n in PROMPTS]
    with ExitStack() as stack:
        modules = (
            modeling_gemma2, modeling_llama, modeling_qwen2, modeling_mistral, modeling_qwen3_moe, modeling_mixtral,
            modeling_qwen2_moe, rope_utils,
        )  # fmt: skip
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        model = build(name)
        stored = {stem: values.to(torch.float32) for stem, values in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del stored["lm_head.weight"]
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
