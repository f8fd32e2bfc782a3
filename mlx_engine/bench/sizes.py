"""Sizes of the weights and caches that a forward pass reads, on a given backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.layer_types import layer_type
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import STORED, Conversion
from mlx_engine.weights.model import model_file
from mlx_engine.weights.plan import check

# Tables with a row per token id or position; every other tensor of two axes is a matrix of a product.
LOOKED_UP = ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")
HEAD, TIED_HEAD = "output.weight", "token_embd.weight"
# Matrices of the last layer that are multiplied with every token.
BEFORE_ATTENTION = ("attn_q", "attn_k", "attn_v")
# The KV cache is float32 on the CPU.
CACHE_ITEM_BYTES = 4
# A Python float takes 24 bytes, and its reference in a list 8.
PYTHON_FLOAT_BYTES = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the weights and caches that a pass reads.

    Attributes:
        layers: weights of the layers' matrices that one token is multiplied with: of experts, the share that it uses.
        head: weights of the head.
        nbytes: bytes of layers and head without experts, as the backend holds them.
        cached: bytes of keys and values per token that attention reads, over all layers.
        scored: multiplications of attention per query and visible token, summed over all layers.
        local: the share of layers with a sliding window of `window` tokens.
        behind: weights of the last layer that are multiplied with the last token of a pass only.
        scored_last: the last layer's part of `scored`; it has only the last token's query.
        head_nbytes: the head's part of `nbytes`.
        expert_nbytes: bytes of all experts.
        expert_share: the share of the experts that one token uses.
    """

    layers: int
    head: int
    nbytes: float
    cached: int
    scored: int
    local: float = 0.0
    window: int = 0
    behind: int = 0
    scored_last: int = 0
    head_nbytes: float = 0.0
    expert_nbytes: float = 0.0
    expert_share: float = 1.0


def sizes(checkpoint: Checkpoint, held: Callable[[GGMLType], float], conversion: Conversion = STORED) -> Sizes:
    """Return the sizes of a checkpoint's model on a backend with `held(type)` bytes per weight of a type.

    Raises:
        ModelError: no model can be built from the checkpoint.
    """
    plan = model_file(checkpoint).plan(checkpoint)
    tensors = check(checkpoint, plan)
    head = HEAD if HEAD in tensors else TIED_HEAD
    counts = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    layers = [n for n, tensor in tensors.items() if len(tensor.shape) == 2 and n not in (*LOOKED_UP, head)]
    share = plan.config.n_experts_used / plan.config.n_experts if any(map(_is_expert, layers)) else 1.0
    used = {name: counts[name] * (share if _is_expert(name) else 1) for name in layers}
    last = f"blk.{plan.config.n_layers - 1}."
    before = tuple(last + name for name in BEFORE_ATTENTION)

    def bytes_of(name: str) -> float:
        stored = checkpoint.weight(tensors[name].stored(checkpoint.naming).name).type
        return counts[name] * held(conversion.type_of(name, tensors[name].shape, stored)[0])

    cfg: Any = plan.config
    # Layers with a state attend to no earlier tokens.
    kinds = getattr(cfg, "kinds", None)
    each = [cfg.of_layer(i) for i in range(cfg.n_layers) if kinds is None or kinds[i] == "full_attention"]
    windows: list[int] = [window for window in cfg.windows if window is not None]
    return Sizes(
        layers=round(sum(used.values())),
        head=counts[head],
        nbytes=sum(bytes_of(name) for name in [*layers, head] if not _is_expert(name)),
        cached=sum(2 * of.n_kv_heads * of.head_dim * CACHE_ITEM_BYTES for of in each),
        scored=sum(2 * of.n_heads * of.head_dim for of in each),
        local=len(windows) / cfg.n_layers,
        window=windows[0] if windows else 0,
        behind=round(sum(used[name] for name in layers if name.startswith(last) and not name.startswith(before))),
        scored_last=2 * each[-1].n_heads * each[-1].head_dim,
        head_nbytes=bytes_of(head),
        expert_nbytes=sum(bytes_of(name) for name in layers if _is_expert(name)),
        expert_share=share,
    )


def _is_expert(name: str) -> bool:
    return layer_type(name).endswith("_exps")


def bytes_per_weight(backend: Backend, type_: GGMLType) -> float:
    """Return a backend's bytes per weight for this type, determined with a small matrix."""
    shape = (32, type_.block_size)
    data = np.zeros(type_.bytes_for(math.prod(shape)), dtype=np.uint8)
    prepared = backend.prepare(Weight("small", shape, type_, data))
    if isinstance(prepared, list):
        return PYTHON_FLOAT_BYTES
    return nbytes_of(prepared) / math.prod(shape)
