"""Write the intermediate values of transformers for the micro checkpoints of tests/data, as NAME-micro/taps.npz.

Tests never run this. The files have every value that the engine names (`backends/observed.py`), for prompt 1 of the
folder's golden file, in float64 throughout, saved as float32. The logits are compared with those of the golden file
before anything is written.

    python -m tests.golden.make_tap_goldens
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers import modeling_rope_utils as rope_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

from tests.golden.make_goldens import DATA, DoubleTorch, logits_of

MODULES = {
    "gemma2": modeling_gemma2, "gemma3": modeling_gemma3, "gpt2": modeling_gpt2, "llama": modeling_llama,
    "mistral": modeling_mistral, "qwen2": modeling_qwen2,
}  # fmt: skip
Keep = Callable[[str, torch.Tensor], None]


def output_of(module: torch.nn.Module, name: str, keep: Keep) -> None:
    """Record the output of a module."""
    module.register_forward_hook(
        lambda _module, _inputs, output: keep(name, output[0] if isinstance(output, tuple) else output)
    )


def input_of(module: torch.nn.Module, name: str, keep: Keep) -> None:
    """Record the input of a module."""
    module.register_forward_pre_hook(lambda _module, inputs: keep(name, inputs[0]))


def watch_gpt2(model: Any, keep: Keep) -> None:
    """Name the values of GPT-2: one matrix makes queries, keys and values."""
    width = model.config.n_embd
    input_of(model.transformer.h[0], "embed", keep)
    for i, layer in enumerate(model.transformer.h):
        blk, attention, mlp = f"blk.{i}.", layer.attn, layer.mlp
        output_of(layer.ln_1, blk + "attn_norm", keep)
        for part, name in enumerate(("attn_q", "attn_k", "attn_v")):
            columns = slice(part * width, (part + 1) * width)
            attention.c_attn.register_forward_hook(
                lambda _m, _i, output, name=blk + name, columns=columns: keep(name, output[..., columns])
            )
        input_of(attention.c_proj, blk + "attn_out", keep)
        output_of(attention.c_proj, blk + "attn_output", keep)
        input_of(layer.ln_2, blk + "attn_residual", keep)
        output_of(layer.ln_2, blk + "ffn_norm", keep)
        output_of(mlp.c_fc, blk + "ffn_up", keep)
        output_of(mlp.c_proj, blk + "ffn_down", keep)
        output_of(layer, blk + "layer_out", keep)
    output_of(model.transformer.ln_f, "output_norm", keep)


def watch_llama(model: Any, keep: Keep) -> None:
    """Name the values of Llama, Mistral, Qwen2 and Gemma, which has norms of what is added; Gemma 3 of heads, too."""
    is_gemma = model.config.model_type.startswith("gemma")
    output_of(model.model.embed_tokens, "embed", keep)
    for i, layer in enumerate(model.model.layers):
        blk, attention, mlp = f"blk.{i}.", layer.self_attn, layer.mlp
        ffn_norm = layer.pre_feedforward_layernorm if is_gemma else layer.post_attention_layernorm
        output_of(layer.input_layernorm, blk + "attn_norm", keep)
        for name in ("q", "k", "v"):
            output_of(getattr(attention, f"{name}_proj"), f"{blk}attn_{name}", keep)
        input_of(attention.o_proj, blk + "attn_out", keep)
        output_of(attention.o_proj, blk + "attn_output", keep)
        input_of(ffn_norm, blk + "attn_residual", keep)
        output_of(ffn_norm, blk + "ffn_norm", keep)
        for name in ("gate", "up", "down"):
            output_of(getattr(mlp, f"{name}_proj"), f"{blk}ffn_{name}", keep)
        output_of(layer, blk + "layer_out", keep)
        if is_gemma:
            # Hooks see (B, H, T, E) here; the engine has (T, H, E).
            for name in ("q", "k") if hasattr(attention, "q_norm") else ():
                getattr(attention, f"{name}_norm").register_forward_hook(
                    lambda _m, _i, output, name=f"{blk}attn_{name}_norm": keep(name, output.transpose(1, 2))
                )
            output_of(layer.post_attention_layernorm, blk + "post_attention_norm", keep)
            output_of(layer.post_feedforward_layernorm, blk + "post_ffw_norm", keep)
    output_of(model.model.norm, "output_norm", keep)


def taps_of(name: str, ids: list[int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return every named value of a pass, and its logits, in float64."""
    taps: dict[str, np.ndarray] = {}

    def keep(tap: str, x: torch.Tensor) -> None:
        if tap in taps:
            raise ValueError(f"{tap} was computed twice")
        taps[tap] = x[0].detach().numpy().copy()

    module = MODULES[name]
    with ExitStack() as stack:
        for patched in (module, rope_utils):
            stack.enter_context(mock.patch.object(patched, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        model = AutoModelForCausalLM.from_pretrained(DATA / f"{name}-micro" / "hf", attn_implementation="eager")
        model = model.double().eval()
        if name == "gpt2":
            watch_gpt2(model, keep)
        else:
            watch_llama(model, keep)
            # RoPE is a function, not a module: it is called once per layer, in order.
            rotate, calls = module.apply_rotary_pos_emb, iter(range(len(model.model.layers)))

            def rotate_and_keep(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
                q, k = rotate(*args, **kwargs)
                i = next(calls)
                keep(f"blk.{i}.q_rope", q.transpose(1, 2))
                keep(f"blk.{i}.k_rope", k.transpose(1, 2))
                return q, k

            stack.enter_context(mock.patch.object(module, "apply_rotary_pos_emb", rotate_and_keep))
        return taps, logits_of(model, ids)


def make(name: str) -> None:
    """Write one folder's file."""
    folder = DATA / f"{name}-micro"
    with np.load(folder / "golden.npz") as golden:
        ids, want = golden["prompt1"].tolist(), golden["logits1"]
    taps, logits = taps_of(name, ids)
    worst = float(np.abs(logits - want).max() / np.sqrt(np.mean(want**2)))
    if worst > 1e-6:
        raise ValueError(f"{name}: logits differ from those of the golden file by {worst:.1e}")
    np.savez_compressed(folder / "taps.npz", **{tap: values.astype(np.float32) for tap, values in taps.items()})
    print(
        f"{name}: {len(taps)} values, logits within {worst:.1e}, {(folder / 'taps.npz').stat().st_size / 1024:.0f} KB"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or MODULES:
        make(chosen)
