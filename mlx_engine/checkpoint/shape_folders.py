"""Write GPT-2 and Gemma 3 folders with random weights: config.json, safetensors and tokenizer.json."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.checkpoint.safetensors_writer import Entry, write_safetensors
from mlx_engine.checkpoint.shape_vocabulary import tokenizer_json
from mlx_engine.errors import SourceError
from mlx_engine.quant.types import BF16, F32, GGMLType

# Values drawn and written at a time.
PIECE = 1 << 20

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Random:
    """A tensor of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class GPT2Shape:
    """Sizes of a GPT-2. Its FFN size is four times the hidden size, and its output head is tied to the embedding."""

    n_layers: int
    hidden_size: int
    n_heads: int
    vocab_size: int
    context_length: int
    type: GGMLType = F32

    def config(self) -> dict[str, Any]:
        """Return config.json: these sizes, and the other values of openai-community/gpt2."""
        return {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": self.vocab_size - 1,
            "embd_pdrop": 0.1,
            "eos_token_id": self.vocab_size - 1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "model_type": "gpt2",
            "n_ctx": self.context_length,
            "n_embd": self.hidden_size,
            "n_head": self.n_heads,
            "n_layer": self.n_layers,
            "n_positions": self.context_length,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[Random]:
        """Yield tensors with GPT-2's initialisation: residual projections are scaled down with the number of layers."""
        D = self.hidden_size
        residual = 0.02 / math.sqrt(2 * self.n_layers)
        yield Random("wte.weight", (self.vocab_size, D), 0.02)
        yield Random("wpe.weight", (self.context_length, D), 0.01)
        for i in range(self.n_layers):
            yield from _layer_norm(f"h.{i}.ln_1", D)
            yield from _conv1d(f"h.{i}.attn.c_attn", D, 3 * D, 0.02)
            yield from _conv1d(f"h.{i}.attn.c_proj", D, D, residual)
            yield from _layer_norm(f"h.{i}.ln_2", D)
            yield from _conv1d(f"h.{i}.mlp.c_fc", D, 4 * D, 0.02)
            yield from _conv1d(f"h.{i}.mlp.c_proj", 4 * D, D, residual)
        yield from _layer_norm("ln_f", D)


def _layer_norm(name: str, width: int) -> tuple[Random, Random]:
    return Random(f"{name}.weight", (width,), 0.1, mean=1.0), Random(f"{name}.bias", (width,), 0.02)


def _conv1d(name: str, n_in: int, n_out: int, std: float) -> tuple[Random, Random]:
    """Return a linear layer in GPT-2's layout (Conv1D): one row per input."""
    return Random(f"{name}.weight", (n_in, n_out), std), Random(f"{name}.bias", (n_out,), 0.02)


@dataclass(frozen=True)
class Gemma3Shape:
    """Sizes of a Gemma 3 text model."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    window: int
    type: GGMLType = BF16

    def config(self) -> dict[str, Any]:
        """Return config.json: these sizes, and the other values of google/gemma-3-1b-it."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "model_type": "gemma3_text",
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": self.window,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[Random]:
        """Yield random matrices and norm weights. Gemma stores a norm weight as its difference from 1."""
        D, F, E = self.hidden_size, self.intermediate_size, self.head_dim
        H, K = self.n_heads * E, self.n_kv_heads * E
        yield Random("model.embed_tokens.weight", (self.vocab_size, D), 0.02)
        for i in range(self.n_layers):
            matrices = {
                "self_attn.q_proj": (H, D),
                "self_attn.k_proj": (K, D),
                "self_attn.v_proj": (K, D),
                "self_attn.o_proj": (D, H),
                "mlp.gate_proj": (F, D),
                "mlp.up_proj": (F, D),
                "mlp.down_proj": (D, F),
            }
            norms = {
                "input_layernorm": D,
                "self_attn.q_norm": E,
                "self_attn.k_norm": E,
                "post_attention_layernorm": D,
                "pre_feedforward_layernorm": D,
                "post_feedforward_layernorm": D,
            }
            for name, shape in matrices.items():
                yield Random(f"model.layers.{i}.{name}.weight", shape, 0.02)
            for name, width in norms.items():
                yield Random(f"model.layers.{i}.{name}.weight", (width,), 0.1)
        yield Random("model.norm.weight", (D,), 0.1)


FolderShape: TypeAlias = GPT2Shape | Gemma3Shape


def write_folder(folder: Path, shape: FolderShape, progress: Progress | None = None) -> None:
    """Write a checkpoint of this shape. The folder appears only when it is complete.

    `progress` is called with (pieces written, total pieces).

    Raises:
        SourceError: the folder cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        draft.mkdir(exist_ok=True)
        tensors = list(shape.tensors())
        entries = [Entry(tensor.name, tensor.shape, shape.type) for tensor in tensors]
        (draft / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
        (draft / "tokenizer.json").write_text(json.dumps(tokenizer_json(shape.vocab_size)))
        write_safetensors(draft / "model.safetensors", entries, _pieces(tensors, shape.type, progress))
        # Another process may have written the same folder in the meantime.
        if not folder.exists():
            draft.rename(folder)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be written ({error.strerror}); check folder and space") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _pieces(tensors: Sequence[Random], type_: GGMLType, progress: Progress | None) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    sizes = [(tensor, min(PIECE, left)) for tensor in tensors for left in range(math.prod(tensor.shape), 0, -PIECE)]
    for done, (tensor, size) in enumerate(sizes, 1):
        values = rng.standard_normal(size, dtype=np.float32)
        yield quant.quantize(values * np.float32(tensor.std) + np.float32(tensor.mean), type_)
        if progress is not None:
            progress(done, len(sizes))
