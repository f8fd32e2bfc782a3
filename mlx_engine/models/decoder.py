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
from mlx_engine.backends.batch import Batch, Wanted
from mlx_engine.backends.parameters import Array, Layer, Norm, Token
from mlx_engine.backends.program import Layers, Program
from mlx_engine.cache import KVLayer, KVPool, KVSequence
from mlx_engine.models.parameters import Parameters


def decoder_layer(
    be: Backend, w: Layer, i: int, x: Array, batch: Batch, *, head_dim: int, scale: float, want: Wanted
) -> Array:
    """Return the hidden states (T, D) that layer i makes of x, or (R, D) of the tokens that are wanted.

    Args:
        be: the operations.
        w: the layer's parameters.
        i: the layer's number, for its keys and values and for names.
        x: hidden states (T, D).
        batch: whose tokens these are, and where their keys and values go.
        head_dim: E.
        scale: of the attention scores.
        want: whose hidden states anybody reads. Of the other tokens only keys and values are computed.
    """
    q, k, v = be.norm_project(x, w.attn_norm, (w.attn_q, w.attn_k, w.attn_v))
    if w.rope is None:
        q, k, v = be.heads(q, head_dim), be.heads(k, head_dim), be.heads(v, head_dim)
    else:
        q, k, v = be.head_norm_rope(q, k, v, head_dim, w.head_norms, w.rope, batch.positions)
        be.note(f"blk.{i}.q_rope", q)
        be.note(f"blk.{i}.k_rope", k)
    kv, counts = be.kv_append(batch, i, k, v), batch.lengths
    if want == "none":
        return x
    if want == "some":
        q, x, counts = be.take(q, batch.rows), be.take(x, batch.rows), batch.wanted
    y = be.note(f"blk.{i}.attn_out", be.merge(be.attention(q, kv, counts, scale)))
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
    be: Backend, x: Array, batch: Batch, *, want: Wanted, layers: Sequence[Layer], head_dim: int, scale: float
) -> Array:
    """Return the hidden states after all layers: (T, D), or (R, D) of the tokens that are wanted."""
    for i, w in enumerate(layers):
        here = want if i == len(layers) - 1 else "every"
        x = decoder_layer(be, w, i, x, batch, head_dim=head_dim, scale=scale, want=here)
    return x


class Decoder:
    """A batch in, logits out; keys and values are the caller's. Model files derive their `Model` from this class."""

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

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return the hidden states (T, D) before the first layer, of tokens at these positions."""
        return self.backend.embed(self.token_embd, ids)

    def forward(self, batch: Batch) -> Array | None:
        """Return logits (R, V) of the tokens that are wanted, or None if there are none.

        Keys and values of all new tokens are written; the caller commits the batch, or rolls it back.
        """
        x = self.backend.note("embed", self.embed(batch.ids, batch.positions))
        x = self.program.run(x, batch)
        return None if batch.want == "none" else self.backend.norm_head(x, self.output_norm, self.output)

    @property
    def kv_layers(self) -> list[KVLayer]:
        """What each layer keeps of a token."""
        cfg = self.config
        return [KVLayer(cfg.n_kv_heads, cfg.head_dim, w.window) for w in self.layers]

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return memory for the keys and values of `n_tokens` tokens; the options are those of `KVPool`."""
        return KVPool(self.backend, self.kv_layers, n_tokens, **options)

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return an empty sequence of at most `n_tokens` tokens, with a pool of its own."""
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty sequence for one pass of `n_tokens` tokens, of which no later pass reads anything."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)
