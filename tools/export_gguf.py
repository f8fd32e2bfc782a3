"""Write a checkpoint of `tools/train.py` as a Q8_0 GGUF file.

``python -m tools.export_gguf --checkpoint build/checkpoint.pt --tokenizer build/tokenizer.json``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from tools.qwen3_torch import Config

Arrays = Mapping[str, NDArray[np.float32]]

NAME = "mlx_engine storyteller"
DESCRIPTION = "A tiny story-telling model, trained from scratch on text that our own generator wrote."
NORMAL, CONTROL = 1, 3
MOSTLY_Q8_0 = 7
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
OUTER_NAMES = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
BLOCK_NAMES = {
    "attn_norm": "attn_norm", "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v",
    "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "attn.output": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def tensor_name(name: str) -> str:
    """Return llama.cpp's name for a parameter of the PyTorch model."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, index, inner = name.split(".", 2)
    return f"blk.{index}.{BLOCK_NAMES[inner.removesuffix('.weight')]}.weight"


def model_keys(config: Config) -> dict[str, int | float]:
    """Return the model's sizes by GGUF key, without the prefix."""
    return {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.freq_base": config.theta,
    }


def metadata(config: Config, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return all metadata of the file, in order."""
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = {**tokenizer["model"]["vocab"], **special}
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    return {
        "general.architecture": "qwen3",
        "general.name": NAME,
        "general.author": "the mlx_engine authors",
        "general.license": "mit",
        "general.description": DESCRIPTION,
        "general.quantization_version": 2,
        "general.file_type": MOSTLY_Q8_0,
        **{f"qwen3.{key}": value for key, value in model_keys(config).items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": special["<|im_end|>"],
        "tokenizer.ggml.bos_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one key with the type that llama.cpp uses."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write(path: Path, keys: Mapping[str, Any], tensors: Arrays) -> None:
    """Write the file: matrices in Q8_0, norms in float32."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, str(keys["general.architecture"]))
    for key, value in keys.items():
        if key != "general.architecture":  # GGUFWriter has already added this key
            add_key(writer, key, value)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, array in tensors.items():
        if array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def main() -> None:
    """Read the options and write the file."""
    parser = argparse.ArgumentParser(prog="tools.export_gguf", description="Write a checkpoint as GGUF.")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/checkpoint.pt"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/tokenizer.json"))
    parser.add_argument("--out", type=Path, default=Path("build/storyteller-q8_0.gguf"))
    args = parser.parse_args()
    state = torch.load(args.checkpoint, weights_only=True)
    tokenizer = json.loads(args.tokenizer.read_text("utf-8"))
    tensors = {tensor_name(name): weight.numpy() for name, weight in state["model"].items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, metadata(Config(**state["config"]), tokenizer), tensors)
    print(f"{args.out.stat().st_size} bytes in {args.out} after {state['tokens']} training tokens")


if __name__ == "__main__":
    main()
