"""The decoder-only transformer: what a layer does and in which order, said once for every architecture and backend.

`decoder_layer` is the definition. A backend runs it operation by operation, or records it once and compiles what it has
recorded (`Backend.compile`): whoever changes the order here changes it everywhere. A model file says what its layers
are made of; what an architecture does not have is None in its `Layer`, and left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Layer, Norm
from mlx_engine.backends.program import Layers, Program
from mlx_engine.cache import Cache, FullCache, NoCache
from mlx_engine.models.parameters import Parameters


def decoder_layer(
    be: Backend, w: Layer, i: int, x: Array, cache: Cache, *, head_dim: int, scale: float, offset: int, last_only: bool
) -> Array:
    """Return the hidden states (T, D) that layer i makes of x, or (1, D) of the last token alone.

    Args:
        be: the operations.
        w: the layer's parameters.
        i: the layer's number, for the cache and for names.
        x: hidden states (T, D).
        cache: where keys and values go.
        head_dim: E.
        scale: of the attention scores.
        offset: position of the first token.
        last_only: whether the other tokens' hidden states are wanted by nobody: then only their keys and values are
            computed.
    """
    q, k, v = be.norm_project(x, w.attn_norm, (w.attn_q, w.attn_k, w.attn_v))
    if w.rope is None:
        q, k, v = be.heads(q, head_dim), be.heads(k, head_dim), be.heads(v, head_dim)
    else:
        q, k, v = be.head_norm_rope(q, k, v, head_dim, w.head_norms, w.rope, offset)
        be.note(f"blk.{i}.q_rope", q)
        be.note(f"blk.{i}.k_rope", k)
    kv = cache.append(i, k, v)
    if last_only:
        q, x = be.last(q), be.last(x)
    y = be.note(f"blk.{i}.attn_out", be.merge(be.attention(q, kv, scale)))
    if w.post_attention_norm is None:
        x = be.project_add(y, w.attn_output, x)
    else:
        x = be.project_norm_add(y, w.attn_output, w.post_attention_norm, x)
    be.note(f"blk.{i}.attn_residual", x)
    if w.ffn_gate is None:
        h = be.norm_up(x, w.ffn_norm, w.ffn_up, w.activation)
    else:
        h = be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, w.ffn_up, w.activation)
    if w.post_ffw_norm is None:
        x = be.project_add(h, w.ffn_down, x)
    else:
        x = be.project_norm_add(h, w.ffn_down, w.post_ffw_norm, x)
    return be.note(f"blk.{i}.layer_out", x)


def decoder_layers(
    be: Backend, x: Array, cache: Cache, offset: int, *, every: bool, layers: Sequence[Layer], head_dim: int,
    scale: float,
) -> Array:  # fmt: skip
    """Return the hidden states behind all layers: (T, D) of `every` token, or (1, D) of the last one."""
    for i, w in enumerate(layers):
        last_only = not every and i == len(layers) - 1
        x = decoder_layer(be, w, i, x, cache, head_dim=head_dim, scale=scale, offset=offset, last_only=last_only)
    return x


class Decoder:
    """Token ids in, logits out; the cache is the caller's. Model files derive their `Model` from this class."""

    config: Any
    program: Program

    def __init__(
        self, config: Any, parameters: Parameters, backend: Backend, *, layers: Sequence[Layer], output_norm: Norm,
        scale: float,
    ) -> None:  # fmt: skip
        """Build a model of which `config` has at least n_layers, n_kv_heads and head_dim.

        Args:
            config: the architecture's sizes.
            parameters: where the embedding table and the head come from; without a head of its own a model is tied to
                the table.
            backend: computes.
            layers: the parameters of each layer.
            output_norm: the norm before the head.
            scale: of the attention scores.
        """
        self.config, self.layers, self.output_norm, self.scale = config, tuple(layers), output_norm, scale
        self.token_embd = parameters.table("token_embd")
        self.output = parameters.linear("output" if "output.weight" in parameters else "token_embd")
        self.backend = backend

    @property
    def backend(self) -> Backend:
        """What computes. When it is set, the layers are compiled for it: set it again after another change."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend, self.program = backend, backend.compile(self.definition)

    @property
    def definition(self) -> Layers:
        """The order of all layers, as a function of a backend."""
        return partial(decoder_layers, layers=self.layers, head_dim=self.config.head_dim, scale=self.scale)

    def embed(self, ids: Sequence[int], offset: int) -> Array:
        """Return the hidden states (T, D) before the first layer; `offset` is the first token's position."""
        return self.backend.embed(self.token_embd, ids)

    def forward(self, ids: Sequence[int], cache: Cache, *, every: bool = False) -> Array:
        """Return logits (1, V) of the last of the T tokens, or (T, V) of `every` token.

        Raises:
            CacheFullError: the tokens do not fit the cache.
        """
        offset = cache.reserve(len(ids))
        x = self.backend.note("embed", self.embed(ids, offset))
        x = self.program.run(x, cache, offset, every=every or len(ids) == 1)
        logits = self.backend.norm_head(x, self.output_norm, self.output, every=every)
        cache.advance(len(ids))
        return logits

    def new_cache(self, capacity: int) -> Cache:
        """Return an empty cache for at most `capacity` tokens."""
        cfg = self.config
        return FullCache(
            self.backend, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim, capacity=capacity
        )

    def no_cache(self) -> Cache:
        """Return a cache that remembers nothing: every pass brings the whole sequence."""
        return NoCache(self.backend, n_kv_heads=self.config.n_kv_heads, head_dim=self.config.head_dim)
