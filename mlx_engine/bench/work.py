"""What a test needs at least: bytes that have to come from memory, and arithmetic. Nothing is measured here.

Every pass reads each matrix once, whatever number of tokens it has; looking up an embedding reads a row and counts for
nothing. A table that is also the head counts once, as the head, which only the last token of a pass is multiplied with,
as what lies behind the keys and values of the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.profiled import nbytes_of
from mlx_engine.bench.cells import Test
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.decode.loop import CHUNK
from mlx_engine.models import model_file
from mlx_engine.models.conversion import STORED, Conversion
from mlx_engine.models.parameters import check
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

# Tables of which a token takes its row; whatever else has two axes is multiplied with.
LOOKED_UP = ("token_embd.weight", "position_embd.weight")
HEAD, TIED_HEAD = "output.weight", "token_embd.weight"
# What every token of the last layer is multiplied with.
BEFORE_ATTENTION = ("attn_q", "attn_k", "attn_v")
# Caches on the CPU hold float32.
CACHE_ITEM_BYTES = 4
# A Python float is an object of 24 bytes, and its place in a list takes 8 more.
PYTHON_FLOAT_BYTES = 32


@dataclass(frozen=True)
class Sizes:
    """What a pass multiplies with.

    Attributes:
        layers: weights of the layers' matrices.
        head: weights of the head.
        nbytes: bytes of both, as the backend holds them.
        cached: bytes of keys and values per token, over all layers.
        scored: multiplications of attention per query and visible token, over all layers.
        local: the share of layers whose tokens see the last `window` tokens alone.
        behind: weights of the last layer that only the last token of a pass is multiplied with.
        scored_last: what the last layer has of `scored`: its only query is the last token's.
        head_nbytes: what the head has of `nbytes`.
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


@dataclass(frozen=True)
class Work:
    """Of a whole test, its timed passes together."""

    flops: float
    nbytes: float


def sizes(checkpoint: Checkpoint, held: Callable[[GGMLType], float], conversion: Conversion = STORED) -> Sizes:
    """The sizes of a checkpoint's model, for a backend that holds a weight of a type in `held(type)` bytes.

    Raises:
        ModelError: no model can be built of it.
    """
    plan = model_file(checkpoint).plan(checkpoint)
    tensors = check(checkpoint, plan)
    head = HEAD if HEAD in tensors else TIED_HEAD
    counts = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    layers = [n for n, tensor in tensors.items() if len(tensor.shape) == 2 and n not in (*LOOKED_UP, head)]
    last = f"blk.{plan.config.n_layers - 1}."
    before = tuple(last + name for name in BEFORE_ATTENTION)

    def bytes_of(name: str) -> float:
        stored = checkpoint.weight(tensors[name].stored(checkpoint.naming).name).type
        return counts[name] * held(conversion.type_of(name, tensors[name].shape, stored)[0])

    cfg: Any = plan.config
    windows: list[int] = [window for window in cfg.windows if window is not None]
    return Sizes(
        layers=sum(counts[name] for name in layers),
        head=counts[head],
        nbytes=sum(map(bytes_of, [*layers, head])),
        cached=cfg.n_layers * 2 * cfg.n_kv_heads * cfg.head_dim * CACHE_ITEM_BYTES,
        scored=cfg.n_layers * 2 * cfg.n_heads * cfg.head_dim,
        local=len(windows) / cfg.n_layers,
        window=windows[0] if windows else 0,
        behind=sum(counts[name] for name in layers if name.startswith(last) and not name.startswith(before)),
        scored_last=2 * cfg.n_heads * cfg.head_dim,
        head_nbytes=bytes_of(head),
    )


def bytes_per_weight(backend: Backend, type_: GGMLType) -> float:
    """Bytes that a backend keeps of a matrix of this type, seen on a small one that it prepares."""
    shape = (32, type_.block_size)
    data = np.zeros(type_.bytes_for(math.prod(shape)), dtype=np.uint8)
    prepared = backend.prepare(Weight("small", shape, type_, data))
    if isinstance(prepared, list):
        return PYTHON_FLOAT_BYTES
    return nbytes_of(prepared) / math.prod(shape)


def work(of: Sizes, test: Test, *, kv: bool) -> Work:
    """What the timed passes of a test need, with a cache or without."""
    flops = nbytes = 0.0
    for n, before, wanted in passes(test, kv=kv):
        everything, latest = n * before + n * (n + 1) // 2, sum(min(of.window, before + i) for i in range(1, n + 1))
        scored = (of.scored - of.scored_last) * _mean(of, everything, latest)
        scored += wanted * of.scored_last * _mean(of, before + n, min(of.window, before + n))
        flops += 2.0 * (of.layers * n - of.behind * (n - wanted) + wanted * of.head + scored)
        # What any of the new tokens sees has to be read.
        nbytes += of.nbytes if wanted else of.nbytes - of.head_nbytes
        nbytes += of.cached * _mean(of, before + n, min(before + n, of.window - 1 + n)) if kv else 0
    return Work(flops, nbytes)


def _mean(of: Sizes, everywhere: int, nearby: int) -> float:
    """A layer's number on average, where local ones have one and the others another."""
    return (1 - of.local) * everywhere + of.local * nearby


def passes(test: Test, *, kv: bool) -> Iterator[tuple[int, int, int]]:
    """(Tokens, tokens in the cache before them, of how many logits are wanted) of every pass that a test times."""
    before = test.depth + test.n_prompt
    if not kv:
        yield from [(before, 0, 1)] if test.n_prompt else []
        yield from ((before + 1 + i, 0, 1) for i in range(test.n_gen))
        return
    for start in range(0, test.n_prompt, CHUNK):
        yield min(CHUNK, test.n_prompt - start), test.depth + start, int(start + CHUNK >= test.n_prompt)
    yield from ((1, before + i, 1) for i in range(test.n_gen))
