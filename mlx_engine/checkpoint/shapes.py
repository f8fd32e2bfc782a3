"""Write checkpoints with the shapes of real models and random weights ("shape:gpt2"), to benchmark without a download.

Each checkpoint is written once, to the user's cache folder; in the context `not_kept`, to a temporary folder. The
checkpoints of GPT-2 and Gemma 3 are Hugging Face folders, all others Q8_0 GGUF files. The models generate noise, but
their timings are valid, because speed does not depend on the values of weights.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine import quant
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.safetensors import Entry, write_safetensors
from mlx_engine.checkpoint.sources import PREFIX
from mlx_engine.errors import SourceError, size
from mlx_engine.kernels import blocks
from mlx_engine.kernels.files import draft, remove_dead
from mlx_engine.observe import log
from mlx_engine.quant.types import BF16, F32, Q8_0, GGMLType
from mlx_engine.quant.weight import Weight

# The random values of a folder's tensors are drawn and written in pieces; this is the number of values in a piece.
PIECE = 1 << 20
# The standard deviation of quants that are uniform from -127 to 127.
QUANTS_STD = 73.6
# The end tokens of the vocabulary.
ENDS = ["<|endoftext|>", "<|im_end|>"]

# Called with (pieces written, total pieces) while a folder is written; not called for GGUF files.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class RandomTensor:
    """A tensor of random values, normally distributed with `mean` and `std`, with two exceptions.

    With `is_decay`, values are uniform between -2 and -0.01, like the tensor `ssm_a` of a gated delta network or a
    Mamba2 mixer. Q8_0 tensors have mean 0 and the given `std`, but their quants are uniform from -127 to 127, because
    uniform numbers are faster to draw.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    type: GGMLType = F32
    is_decay: bool = False

    @property
    def nbytes(self) -> int:
        """Length of `data`, in bytes."""
        return self.type.bytes_for(math.prod(self.shape))

    @property
    def data(self) -> NDArray[np.uint8]:
        """The stored bytes, drawn at each access by a generator whose seed depends on the tensor's name."""
        return self.draw(np.random.default_rng(zlib.crc32(self.name.encode()))).data

    def draw(self, rng: np.random.Generator) -> Weight:
        """Return a weight with random values from `rng`."""
        if self.type == Q8_0:
            packed = np.empty(math.prod(self.shape) // 32, blocks.Q8_0)
            packed["qs"] = rng.integers(-127, 128, (len(packed), 32), dtype=np.int8)
            packed["d"] = self.std / QUANTS_STD
            return Weight(self.name, self.shape, Q8_0, packed.view(np.uint8))
        if self.is_decay:
            return Weight.pack(self.name, -rng.uniform(0.01, 2, self.shape), self.type)
        return Weight.pack(self.name, self.mean + self.std * rng.standard_normal(self.shape), self.type)


def matrix(name: str, *shape: int, gain: float = 1.0, type: GGMLType = Q8_0) -> RandomTensor:
    """Return a matrix that multiplies the standard deviation of its input by `gain`."""
    return RandomTensor(f"{name}.weight", shape, gain * shape[-1] ** -0.5, type=type)


def norm(name: str, n: int) -> RandomTensor:
    """Return a norm weight, with values around 1."""
    return RandomTensor(f"{name}.weight", (n,), 0.1, mean=1.0)


class Shape(ABC):
    """The sizes of a model, which can be written as a checkpoint with random weights."""

    n_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The end of the checkpoint's name."""

    @abstractmethod
    def tensors(self) -> Iterator[RandomTensor]:
        """Yield the tensors in the order of the file.

        Matrices are scaled so that activations neither grow nor vanish from layer to layer.
        """

    @abstractmethod
    def write(self, path: Path, name: str, progress: Progress | None = None) -> None:
        """Write the checkpoint; raise SourceError if it cannot be written."""


# ---- GGUF files: Q8_0 matrices, F32 norms and routers, a made-up vocabulary ----


@dataclass(frozen=True)
class Qwen3Shape(Shape):
    """Sizes of a Qwen3 whose head is tied to its embedding table."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float

    architecture: ClassVar[str] = "qwen3"

    @property
    def suffix(self) -> str:
        return "q8_0.gguf"

    def settings(self) -> dict[str, object]:
        """Return the metadata of this architecture; `write` puts the architecture's name before each key."""
        return {
            "block_count": self.n_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.intermediate_size,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": self.rope_theta,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield matrix("token_embd", self.vocab_size, self.hidden_size, gain=0.6)
        yield norm("output_norm", self.hidden_size)
        for i in range(self.n_layers):
            yield from self.layer(i)

    def layer(self, i: int) -> Iterator[RandomTensor]:
        """Yield the tensors of a layer."""
        at = f"blk.{i}."
        yield norm(f"{at}attn_norm", self.hidden_size)
        yield norm(f"{at}ffn_norm", self.hidden_size)
        yield from self.head_norms(at)
        yield from self.attention(at)
        yield from self.ffn(at)

    def head_norms(self, at: str) -> Iterator[RandomTensor]:
        """Yield the norms of queries and keys."""
        yield from (norm(at + name, self.head_dim) for name in ("attn_q_norm", "attn_k_norm"))

    def attention(self, at: str, q_rows: int = 1) -> Iterator[RandomTensor]:
        """Yield the matrices of attention. With `q_rows` = 2, the query matrix also has the rows of an output gate."""
        D, q_size, kv_size = self.hidden_size, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield matrix(f"{at}attn_q", q_rows * q_size, D)
        yield matrix(f"{at}attn_k", kv_size, D)
        yield matrix(f"{at}attn_v", kv_size, D)
        yield matrix(f"{at}attn_output", D, q_size, gain=0.3)

    def ffn(self, at: str) -> Iterator[RandomTensor]:
        """Yield the matrices of the FFN."""
        D, F = self.hidden_size, self.intermediate_size
        yield matrix(f"{at}ffn_gate", F, D)
        yield matrix(f"{at}ffn_up", F, D)
        yield matrix(f"{at}ffn_down", D, F, gain=0.3)

    def drawn(self) -> Sequence[Weight | RandomTensor]:
        """Return the tensors to write. A `RandomTensor` has no values yet: they are drawn when it is written."""
        rng = np.random.default_rng(0)
        return [tensor.draw(rng) for tensor in self.tensors()]

    def write(self, path: Path, name: str, progress: Progress | None = None) -> None:
        metadata = {
            "general.architecture": self.architecture,
            "general.name": f"{name} shape, random weights",
            "general.file_type": 7,
            **{f"{self.architecture}.{key}": value for key, value in self.settings().items()},
            **gguf_vocabulary(self.vocab_size),
        }
        write_gguf(path, metadata, self.drawn())


@dataclass(frozen=True)
class Qwen35Shape(Qwen3Shape):
    """Sizes of a dense Qwen3.5. Its gated delta networks have the same number of key heads and value heads."""

    n_delta_heads: int
    delta_head_dim: int
    conv_kernel: int

    architecture = "qwen35"
    # Every fourth layer has attention; the others are gated delta networks.
    interval: ClassVar[int] = 4

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "rope.dimension_count": self.head_dim // 4,
            # The sections of multimodal RoPE, which llama.cpp expects in every file of this architecture.
            "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.state_size": self.delta_head_dim,
            "ssm.group_count": self.n_delta_heads,
            "ssm.time_step_rank": self.n_delta_heads,
            "ssm.inner_size": self.n_delta_heads * self.delta_head_dim,
        }

    def layer(self, i: int) -> Iterator[RandomTensor]:
        at = f"blk.{i}."
        yield norm(f"{at}attn_norm", self.hidden_size)
        yield norm(f"{at}post_attention_norm", self.hidden_size)
        if (i + 1) % self.interval:
            yield from self.delta(at)
        else:
            yield from self.attention(at, q_rows=2)
            yield from self.head_norms(at)
        yield from self.ffn(at)

    def delta(self, at: str) -> Iterator[RandomTensor]:
        """Yield the tensors of a gated delta network."""
        D, J, kernel = self.hidden_size, self.n_delta_heads, self.conv_kernel
        inner = J * self.delta_head_dim
        yield matrix(f"{at}attn_qkv", 3 * inner, D)
        yield matrix(f"{at}attn_gate", inner, D)
        yield matrix(f"{at}ssm_beta", J, D)
        yield matrix(f"{at}ssm_alpha", J, D)
        yield matrix(f"{at}ssm_out", D, inner, gain=0.3)
        yield norm(f"{at}ssm_norm", self.delta_head_dim)
        yield matrix(f"{at}ssm_conv1d", 3 * inner, kernel, type=F32)
        yield RandomTensor(f"{at}ssm_dt.bias", (J,), 1.0)
        yield RandomTensor(f"{at}ssm_a", (J,), 1.0, is_decay=True)


@dataclass(frozen=True)
class Qwen35NextShape(Qwen35Shape):
    """Sizes of a dense Qwen3.5 with its layer of multi-token prediction, which has attention."""

    def settings(self) -> dict[str, object]:
        return super().settings() | {"block_count": self.n_layers + 1, "nextn_predict_layers": 1}

    def tensors(self) -> Iterator[RandomTensor]:
        yield from super().tensors()
        at, D = f"blk.{self.n_layers}.", self.hidden_size
        yield norm(f"{at}attn_norm", D)
        yield norm(f"{at}post_attention_norm", D)
        yield from self.attention(at, q_rows=2)
        yield from self.head_norms(at)
        yield from self.ffn(at)
        yield matrix(f"{at}nextn.eh_proj", D, 2 * D)
        yield from (norm(f"{at}nextn.{name}", D) for name in ("enorm", "hnorm", "shared_head_norm"))


@dataclass(frozen=True)
class Qwen3MoeShape(Qwen3Shape):
    """Sizes of a Qwen3-MoE with an untied head. No layer is dense, so no tensor has the size `intermediate_size`."""

    n_experts: int
    n_experts_used: int
    expert_size: int

    architecture = "qwen3moe"

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "expert_count": self.n_experts,
            "expert_used_count": self.n_experts_used,
            "expert_feed_forward_length": self.expert_size,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield from super().tensors()
        yield matrix("output", self.vocab_size, self.hidden_size)

    def ffn(self, at: str) -> Iterator[RandomTensor]:
        D, F, X = self.hidden_size, self.expert_size, self.n_experts
        yield matrix(f"{at}ffn_gate_inp", X, D, type=F32)
        yield matrix(f"{at}ffn_gate_exps", X, F, D)
        yield matrix(f"{at}ffn_up_exps", X, F, D)
        yield matrix(f"{at}ffn_down_exps", X, D, F, gain=0.3)

    def drawn(self) -> Sequence[Weight | RandomTensor]:
        return list(self.tensors())  # without values: the values of all tensors may not fit into memory


@dataclass(frozen=True)
class DeepSeek2Shape(Qwen3MoeShape):
    """Sizes of a DeepSeek-V2, with YaRN and a dense first layer.

    Unlike in DeepSeek-V2-Lite, queries are computed from a latent vector: llama.cpp loads a model without this vector
    only if it has 26 or 27 layers. `head_dim` is the size of a value head, and of a key head without its
    rotated part.
    """

    n_shared: int
    q_latent: int
    latent: int
    rope_dim: int

    architecture = "deepseek2"

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": self.q_latent,
            "attention.kv_lora_rank": self.latent,
            "attention.key_length": self.latent + self.rope_dim,
            "attention.value_length": self.latent,
            "attention.key_length_mla": self.head_dim + self.rope_dim,
            "attention.value_length_mla": self.head_dim,
            "expert_shared_count": self.n_shared,
            "leading_dense_block_count": 1,
            "rope.dimension_count": self.rope_dim,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        }

    def head_norms(self, at: str) -> Iterator[RandomTensor]:
        yield norm(f"{at}attn_q_a_norm", self.q_latent)
        yield norm(f"{at}attn_kv_a_norm", self.latent)

    def attention(self, at: str, q_rows: int = 1) -> Iterator[RandomTensor]:
        D, H, E = self.hidden_size, self.n_heads, self.head_dim
        yield matrix(f"{at}attn_q_a", self.q_latent, D)
        yield matrix(f"{at}attn_q_b", H * (E + self.rope_dim), self.q_latent)
        yield matrix(f"{at}attn_kv_a_mqa", self.latent + self.rope_dim, D)
        yield matrix(f"{at}attn_k_b", H, self.latent, E)
        yield matrix(f"{at}attn_v_b", H, E, self.latent)
        yield matrix(f"{at}attn_output", D, H * E, gain=0.3)

    def ffn(self, at: str) -> Iterator[RandomTensor]:
        if at == "blk.0.":
            yield from Qwen3Shape.ffn(self, at)
            return
        yield from super().ffn(at)
        D, F = self.hidden_size, self.n_shared * self.expert_size
        yield matrix(f"{at}ffn_gate_shexp", F, D)
        yield matrix(f"{at}ffn_up_shexp", F, D)
        yield matrix(f"{at}ffn_down_shexp", D, F, gain=0.3)


@dataclass(frozen=True)
class NemotronHShape(Qwen3Shape):
    """Sizes of a dense Nemotron-H with an untied head.

    Attributes:
        pattern: a character per layer: "M" for a Mamba2 mixer, "*" for attention, "-" for an FFN.
        n_space_heads: the number of heads of a Mamba2 mixer; each head has `space_head_dim` values.
    """

    pattern: str
    n_space_heads: int
    space_head_dim: int
    n_groups: int
    state_dim: int
    conv_kernel: int

    architecture = "nemotron_h"

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "attention.head_count_kv": [self.n_kv_heads * (kind == "*") for kind in self.pattern],
            "feed_forward_length": [self.intermediate_size * (kind == "-") for kind in self.pattern],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.layer_norm_epsilon": 1e-5,
            "rope.dimension_count": self.head_dim,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.state_size": self.state_dim,
            "ssm.group_count": self.n_groups,
            "ssm.time_step_rank": self.n_space_heads,
            "ssm.inner_size": self.n_space_heads * self.space_head_dim,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield from super().tensors()
        yield matrix("output", self.vocab_size, self.hidden_size)

    def layer(self, i: int) -> Iterator[RandomTensor]:
        at, D = f"blk.{i}.", self.hidden_size
        yield norm(f"{at}attn_norm", D)
        if self.pattern[i] == "*":
            yield from self.attention(at)
        elif self.pattern[i] == "-":
            yield matrix(f"{at}ffn_up", self.intermediate_size, D)
            yield matrix(f"{at}ffn_down", D, self.intermediate_size, gain=0.3)
        else:
            J, inner = self.n_space_heads, self.n_space_heads * self.space_head_dim
            channels = inner + 2 * self.n_groups * self.state_dim
            yield matrix(f"{at}ssm_in", inner + channels + J, D)
            yield matrix(f"{at}ssm_conv1d", channels, self.conv_kernel, type=F32)
            yield RandomTensor(f"{at}ssm_conv1d.bias", (channels,), 0.1)
            yield RandomTensor(f"{at}ssm_dt.bias", (J,), 1.0)
            yield RandomTensor(f"{at}ssm_a", (J, 1), 1.0, is_decay=True)
            yield RandomTensor(f"{at}ssm_d", (J, 1), 0.1, mean=1.0)
            yield RandomTensor(f"{at}ssm_norm.weight", (self.n_groups, inner // self.n_groups), 0.1, mean=1.0)
            yield matrix(f"{at}ssm_out", D, inner, gain=0.3)


# ---- Hugging Face folders: config.json, safetensors and tokenizer.json ----


class FolderShape(Shape):
    """The shape of a model whose checkpoint is a folder; all tensors have the same type, `type`."""

    type: GGMLType

    @property
    def suffix(self) -> str:
        return self.type.name.lower()

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""

    def write(self, path: Path, name: str, progress: Progress | None = None) -> None:
        try:
            with draft(path, is_folder=True) as made:
                tensors = list(self.tensors())
                entries = [Entry(tensor.name, tensor.shape, self.type) for tensor in tensors]
                (made / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n")
                (made / "tokenizer.json").write_text(json.dumps(tokenizer_json(self.vocab_size)))
                write_safetensors(made / "model.safetensors", entries, _pieces(tensors, self.type, progress))
                # Another process may have written the same folder in the meantime.
                if not path.exists():
                    made.rename(path)
        except OSError as error:
            raise SourceError(f"{path}: cannot be written ({error.strerror}); check folder and space") from error


def _pieces(tensors: Sequence[RandomTensor], type_: GGMLType, progress: Progress | None) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    sizes = [(tensor, min(PIECE, left)) for tensor in tensors for left in range(math.prod(tensor.shape), 0, -PIECE)]
    for done, (tensor, n) in enumerate(sizes, 1):
        values = rng.standard_normal(n, dtype=np.float32)
        yield quant.quantize(values * np.float32(tensor.std) + np.float32(tensor.mean), type_)
        if progress is not None:
            progress(done, len(sizes))


@dataclass(frozen=True)
class GPT2Shape(FolderShape):
    """Sizes of a GPT-2. Its FFN size is four times the hidden size, and its output head is tied to the embedding."""

    n_layers: int
    hidden_size: int
    n_heads: int
    vocab_size: int
    context_length: int
    type: GGMLType = F32

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json: these sizes, and the other values of openai-community/gpt2."""
        return {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "bos_token_id": self.vocab_size - 1,
            "eos_token_id": self.vocab_size - 1,
            "layer_norm_epsilon": 1e-5,
            "model_type": "gpt2",
            "n_ctx": self.context_length,
            "n_embd": self.hidden_size,
            "n_head": self.n_heads,
            "n_layer": self.n_layers,
            "n_positions": self.context_length,
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        """Yield the tensors. As in GPT-2, `c_proj` matrices have the standard deviation 0.02 / sqrt(2 * n_layers)."""
        D = self.hidden_size
        residual = 0.02 / math.sqrt(2 * self.n_layers)
        yield RandomTensor("wte.weight", (self.vocab_size, D), 0.02)
        yield RandomTensor("wpe.weight", (self.context_length, D), 0.01)
        for i in range(self.n_layers):
            yield from _layer_norm(f"h.{i}.ln_1", D)
            yield from _conv1d(f"h.{i}.attn.c_attn", D, 3 * D, 0.02)
            yield from _conv1d(f"h.{i}.attn.c_proj", D, D, residual)
            yield from _layer_norm(f"h.{i}.ln_2", D)
            yield from _conv1d(f"h.{i}.mlp.c_fc", D, 4 * D, 0.02)
            yield from _conv1d(f"h.{i}.mlp.c_proj", 4 * D, D, residual)
        yield from _layer_norm("ln_f", D)


def _layer_norm(name: str, width: int) -> tuple[RandomTensor, RandomTensor]:
    return norm(name, width), RandomTensor(f"{name}.bias", (width,), 0.02)


def _conv1d(name: str, n_in: int, n_out: int, std: float) -> tuple[RandomTensor, RandomTensor]:
    """Return a linear layer in GPT-2's layout (Conv1D): one row per input."""
    return RandomTensor(f"{name}.weight", (n_in, n_out), std), RandomTensor(f"{name}.bias", (n_out,), 0.02)


@dataclass(frozen=True)
class Gemma3Shape(FolderShape):
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
        """Return the contents of config.json: these sizes, and the other values of google/gemma-3-1b-it."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "model_type": "gemma3_text",
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_theta": 1_000_000,
            "sliding_window": self.window,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        """Yield the tensors. Stored norm weights are around 0, because Gemma stores norm weights minus 1."""
        D, F, E = self.hidden_size, self.intermediate_size, self.head_dim
        q_size, kv_size = self.n_heads * E, self.n_kv_heads * E
        matrices = {
            "self_attn.q_proj": (q_size, D), "self_attn.k_proj": (kv_size, D), "self_attn.v_proj": (kv_size, D),
            "self_attn.o_proj": (D, q_size), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }  # fmt: skip
        norms = {
            "input_layernorm": D, "self_attn.q_norm": E, "self_attn.k_norm": E, "post_attention_layernorm": D,
            "pre_feedforward_layernorm": D, "post_feedforward_layernorm": D,
        }  # fmt: skip
        yield RandomTensor("model.embed_tokens.weight", (self.vocab_size, D), 0.02)
        for i in range(self.n_layers):
            for name, shape in matrices.items():
                yield RandomTensor(f"model.layers.{i}.{name}.weight", shape, 0.02)
            for name, width in norms.items():
                yield RandomTensor(f"model.layers.{i}.{name}.weight", (width,), 0.1)
        yield RandomTensor("model.norm.weight", (D,), 0.1)


# ---- a made-up byte-level BPE vocabulary of any size, which can encode and decode any text ----


def tokens_and_merges(size: int) -> tuple[list[str], list[str]]:
    """Return `size` tokens (256 bytes, byte pairs and triples, two end tokens) and the merges of pairs and triples."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    pairs = (f"{a} {b}" for a, b in itertools.product(letters, letters))
    triples = (f"{a}{b} {c}" for a, b, c in itertools.product(letters, letters, letters))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - 256 - len(ENDS)))
    return [*letters, *(merge.replace(" ", "") for merge in merges), *ENDS], merges


def gguf_vocabulary(size: int) -> dict[str, object]:
    """Return the vocabulary as GGUF metadata."""
    tokens, merges = tokens_and_merges(size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (size - 2) + [3, 3], dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def tokenizer_json(size: int) -> dict[str, Any]:
    """Return the vocabulary as the contents of a tokenizer.json."""
    tokens, merges = tokens_and_merges(size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = range(size - len(ENDS), size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in ends],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


# ---- the table, and the files in the cache folder ----

SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": Qwen3Shape(28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    # A twelfth of the layers and of the vocabulary of Qwen3 30B-A3B, so that the head's share of the work is the same.
    "qwen3-30b-a3b": Qwen3MoeShape(4, 2048, 6144, 32, 4, 128, 12_672, 40_960, 1e6, 128, 8, 768),
    "qwen3.5-0.8b": Qwen35Shape(24, 1024, 3584, 8, 2, 256, 248_320, 262_144, 1e7, 16, 128, 4),
    "qwen3.5-0.8b-mtp": Qwen35NextShape(24, 1024, 3584, 8, 2, 256, 248_320, 262_144, 1e7, 16, 128, 4),
    # 4 of the 27 layers of DeepSeek-V2-Lite, and 4 of the 52 layers of Nemotron-H 8B; the vocabularies are cut by the
    # same factors.
    "deepseek-v2-lite-4": DeepSeek2Shape(
        4, 2048, 10_944, 16, 1, 128, 15_168, 163_840, 1e4, 64, 6, 1408, n_shared=2, q_latent=768, latent=512,
        rope_dim=64,
    ),
    "nemotron-h-4": NemotronHShape(
        4, 4096, 21_504, 32, 8, 128, 10_080, 8192, 1e4, pattern="M-M*", n_space_heads=128, space_head_dim=64,
        n_groups=8, state_dim=128, conv_kernel=4,
    ),
    "gpt2": GPT2Shape(12, 768, 12, 50_257, 1024),
    "gemma3-1b": Gemma3Shape(26, 1152, 6912, 4, 1, 256, 262_144, 32_768, 512),
}  # fmt: skip
# The temporary folder of `not_kept`; None outside this context.
_temporary: Path | None = None


def shape_path(name: str, progress: Progress | None = None) -> Path:
    """Return the path of a shape's checkpoint. If it does not exist, write it; outside `not_kept`, also print its path.

    Raises:
        SourceError: there is no such shape, or its checkpoint cannot be written.
    """
    if name not in SHAPES:
        raise SourceError(f"{PREFIX}{name}: unknown shape; choose {', '.join(SHAPES)}")
    path = file_of(name)
    remove_dead(path.parent)
    if not path.exists() and _temporary is not None:
        path = _temporary / path.name
    if path.exists():
        return path
    _make_folder(path.parent)
    SHAPES[name].write(path, name, progress)
    if _temporary is None:
        files = [path] if path.is_file() else list(path.iterdir())
        nbytes = size(sum(file.stat().st_size for file in files))
        log.note(
            f"{PREFIX}{name}: {nbytes} of random weights are kept in {path} for later runs; "
            f"`mlx-engine cache remove {PREFIX}{name}` removes them; with --no-cache, none are kept"
        )
    return path


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Return a context in which `shape_path` writes new checkpoints to a temporary folder, which is deleted at the end.

    Checkpoints that are in the cache folder are used. If this process is killed, the next process that uses a
    shape removes the temporary folder.

    Raises:
        SourceError: the folder cannot be made.
    """
    global _temporary
    _make_folder(cache_folder())
    with draft(cache_folder() / "shapes", is_folder=True) as folder:
        _temporary = folder
        try:
            yield
        finally:
            _temporary = None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be made ({error.strerror}); set XDG_CACHE_HOME") from error


def file_of(name: str) -> Path:
    """Return the path of the checkpoint of a shape, a key of `SHAPES`; it may not exist yet."""
    return cache_folder() / f"{name}-{SHAPES[name].suffix}"


def cache_folder() -> Path:
    """Return the folder for files that can be regenerated: mlx_engine in XDG_CACHE_HOME, or in ~/.cache."""
    # Unlike `Path.expanduser`, `os.path.expanduser` raises no error if the user has no home folder.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "mlx_engine"
