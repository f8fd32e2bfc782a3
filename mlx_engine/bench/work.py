"""Compute a benchmark's minimum work from the sizes of its model: bytes read from memory, and arithmetic operations.

The benchmarks divide this work by the measured time, and compare the resulting rates with the machine's limits.

A pass reads each matrix once, for any number of tokens. It reads as many experts as its tokens choose on average.
Embedding lookups are neglected. A tied embedding table counts once, as the output head. A pass runs the head, and the
last layer's operations after the projections to queries, keys and values, only for tokens whose logits are wanted: the
last token of a prompt, and every generated token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.experts import share_read
from mlx_engine.bench.samples import Test
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.observe.profiler import Cost
from mlx_engine.quant.key_values import row_nbytes
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import STORED, Conversion, layer_type
from mlx_engine.weights.model import architecture_of
from mlx_engine.weights.plan import check

# Tables with a row per token id or position. All other two-dimensional tensors count as matrices of linear layers.
LOOKED_UP = ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")
HEAD, TIED_HEAD = "output.weight", "token_embd.weight"
# A layer's matrices after its token mixer (such as attention) have names that begin with one of these prefixes.
AFTER_MIXER = ("attn_output", "ssm_out", "shortconv.out_proj", "ffn_", "inp_gate", "proj")
# A Python float takes 24 bytes, and its reference in a list 8.
PYTHON_FLOAT_BYTES = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the weights and caches that a pass reads.

    Attributes:
        layers: number of weights, in all layers, that each token is multiplied with; only chosen experts count.
        head: number of weights of the head.
        nbytes: bytes of the weights of layers and head in the backend's format, without experts.
        cached: bytes of keys and values per token, over all layers.
        scored: multiplications of attention per pair of query token and visible token, over all layers.
        local: the share of layers with a sliding window of `window` tokens.
        last_token_only: number of the last layer's weights, also counted in `layers`, that are multiplied only with
            tokens whose logits are wanted.
        scored_last: the last layer's part of `scored`, which counts only for tokens whose logits are wanted.
        head_nbytes: the head's part of `nbytes`.
        expert_nbytes: bytes of all experts of all layers.
        expert_share: the share of the experts that one token uses.
    """

    layers: int
    head: int
    nbytes: float
    cached: int
    scored: int
    local: float = 0.0
    window: int = 0
    last_token_only: int = 0
    scored_last: int = 0
    head_nbytes: float = 0.0
    expert_nbytes: float = 0.0
    expert_share: float = 1.0


def sizes(
    checkpoint: Checkpoint, held: Callable[[GGMLType], float], conversion: Conversion = STORED, kv_type: str = "f32"
) -> Sizes:
    """Return the sizes of a checkpoint's model. `held` maps a type to the backend's bytes per weight.

    Raises:
        ModelError: no model can be built from the checkpoint.
    """
    plan = architecture_of(checkpoint).plan(checkpoint)
    tensors = check(checkpoint, plan)
    head = HEAD if HEAD in tensors else TIED_HEAD
    counts = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    layers = [n for n, tensor in tensors.items() if len(tensor.shape) == 2 and n not in (*LOOKED_UP, head)]
    share = plan.config.n_experts_used / plan.config.n_experts if any(map(_is_expert, layers)) else 1.0
    used = {name: counts[name] * (share if _is_expert(name) else 1) for name in layers}
    after = tuple(f"blk.{plan.config.n_layers - 1}.{name}" for name in AFTER_MIXER)

    def bytes_of(name: str) -> float:
        stored = checkpoint.weight(tensors[name].stored(checkpoint.naming).name).type
        return counts[name] * held(conversion.type_of(name, tensors[name].shape, stored)[0])

    cfg: Any = plan.config
    # Layers with a recurrent state have no keys and values, so they are left out.
    kinds = getattr(cfg, "kinds", None)
    each = [cfg.of_layer(i) for i in range(cfg.n_layers) if kinds is None or kinds[i] == "full_attention"]
    ends_with_attention = kinds is None or kinds[-1] == "full_attention"
    windows: list[int] = [abs(window) for window in cfg.windows if window is not None]
    return Sizes(
        layers=round(sum(used.values())),
        head=counts[head],
        nbytes=sum(bytes_of(name) for name in [*layers, head] if not _is_expert(name)),
        cached=sum(getattr(of, "n_kv_arrays", 2) * of.n_kv_heads * row_nbytes(of.head_dim, kv_type) for of in each),
        scored=sum(2 * of.n_heads * of.head_dim for of in each),
        local=len(windows) / cfg.n_layers,
        window=windows[0] if windows else 0,
        last_token_only=round(sum(used[name] for name in layers if name.startswith(after))),
        scored_last=2 * each[-1].n_heads * each[-1].head_dim if ends_with_attention else 0,
        head_nbytes=bytes_of(head),
        expert_nbytes=sum(bytes_of(name) for name in layers if _is_expert(name)),
        expert_share=share,
    )


def _is_expert(name: str) -> bool:
    return layer_type(name).endswith("_exps")


def bytes_per_weight(backend: Backend, type_: GGMLType) -> float:
    """Return the bytes that a backend holds per weight of this type, determined with a small matrix."""
    shape = (32, type_.block_size)
    data = np.zeros(type_.bytes_for(math.prod(shape)), dtype=np.uint8)
    prepared = backend.prepare(Weight("small", shape, type_, data))
    if isinstance(prepared, list):
        return PYTHON_FLOAT_BYTES
    return nbytes_of(prepared) / math.prod(shape)


def work(of: Sizes, test: Test, *, kv: bool) -> Cost:
    """Return the work of the timed passes of a test."""
    return sum((pass_work(of, [part], kv=kv) for part in passes(test, kv=kv)), Cost())


def pass_work(of: Sizes, parts: Iterable[tuple[int, int, int]], *, kv: bool = True) -> Cost:
    """Return the work of one pass. A part is one sequence's (new tokens, cached tokens, rows of logits)."""
    flops, cached, rows, n_tokens = 0.0, 0.0, 0, 0
    for n, before, wanted in parts:
        everything, latest = n * before + n * (n + 1) // 2, sum(min(of.window, before + i) for i in range(1, n + 1))
        scored = (of.scored - of.scored_last) * _mean(of, everything, latest)
        scored += wanted * of.scored_last * _mean(of, before + n, min(of.window, before + n))
        flops += 2.0 * (of.layers * n - of.last_token_only * (n - wanted) + wanted * of.head + scored)
        # Keys and values visible to any of the new tokens are read.
        cached += of.cached * _mean(of, before + n, min(before + n, of.window - 1 + n)) if kv else 0
        rows, n_tokens = rows + wanted, n_tokens + n
    experts = of.expert_nbytes * share_read(of.expert_share, n_tokens)
    return Cost(flops, (of.nbytes if rows else of.nbytes - of.head_nbytes) + experts + cached)


def _mean(of: Sizes, everywhere: int, nearby: int) -> float:
    """Return the average over layers: `nearby` for sliding-window layers, `everywhere` for other layers."""
    return (1 - of.local) * everywhere + of.local * nearby


def passes(test: Test, *, kv: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (new tokens, cached tokens, rows of logits) of every timed pass of a test."""
    before = test.depth + test.n_prompt
    if not kv:
        yield from [(before, 0, 1)] if test.n_prompt else []
        yield from ((before + 1 + i, 0, 1) for i in range(test.n_gen))
        return
    for start in range(0, test.n_prompt, LONGEST_PASS):
        yield min(LONGEST_PASS, test.n_prompt - start), test.depth + start, int(start + LONGEST_PASS >= test.n_prompt)
    yield from ((1, before + i, 1) for i in range(test.n_gen))
