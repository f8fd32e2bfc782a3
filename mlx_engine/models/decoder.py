"""The decoder-only transformer: the one definition of a layer, for all architectures and backends.

`decoder_layer` is the definition. A backend runs it operation by operation, or records it once and compiles the
recording (`Backend.compile`). A change of the order here changes every backend. Model files make a `Layer` for each
layer; a part that an architecture does not have is None there, and `decoder_layer` skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch, Wanted
from mlx_engine.backends.mixers import Mixer, ShortConv
from mlx_engine.backends.parameters import Array, Layer, Norm, Token
from mlx_engine.backends.program import Layers, Program
from mlx_engine.cache import CacheLayer, KVLayer, KVPool, KVSequence, StateLayer
from mlx_engine.models.parameters import Parameters


def decoder_layer(be: Backend, w: Layer, i: int, x: Array, batch: Batch, *, head_dim: int, want: Wanted) -> Array:
    """Return the hidden states after layer i: (T, D) of all tokens, or (R, D) of the wanted tokens.

    If no token is wanted, keys and values (or the state) are written and x is returned unchanged.

    Args:
        be: the backend, which runs the operations.
        w: the layer's parameters.
        i: the layer's index.
        x: hidden states (T, D) before the layer.
        batch: the new tokens, and the slots of their keys and values.
        head_dim: E.
        want: which tokens are wanted: "every", "some" (the rows in `batch.rows`) or "none". Queries, keys and values
            are computed for all tokens, attention and the FFN for wanted tokens only.
    """
    if w.mixer is None:
        y = attend(be, w, i, x, batch, head_dim=head_dim, want=want)
    else:
        y = mix(be, w.mixer, i, x, w.attn_norm, batch, want=want)
    if y is None:
        return x
    if want == "some":
        x = be.take(x, batch.rows)
    be.note(f"blk.{i}.attn_out", y)
    if w.post_attention_norm is None:
        x = be.project_add(y, w.attn_output, x)
    else:
        x = be.project_norm_add(y, w.attn_output, w.post_attention_norm, x)
    x = feed_forward(be, w, be.note(f"blk.{i}.attn_residual", x))
    return be.note(f"blk.{i}.layer_out", x)


def attend(be: Backend, w: Layer, i: int, x: Array, batch: Batch, *, head_dim: int, want: Wanted) -> Array | None:
    """Write keys and values, and return attention (R, H*E) of the wanted tokens; None if there are none."""
    q, k, v, *gate = _projections(be, w, x)
    if w.rope is None:
        q, k, v = be.heads(q, head_dim), be.heads(k, head_dim), be.heads(v, head_dim)
    else:
        q, k, v = be.head_norm_rope(q, k, v, head_dim, w.head_norms, w.rope, batch.positions)
        be.note(f"blk.{i}.q_rope", q)
        be.note(f"blk.{i}.k_rope", k)
    kv, counts = be.kv_append(batch, i, k, v), batch.lengths
    if want == "none" or w.scores is None:
        return None
    if want == "some":
        q, gate, counts = be.take(q, batch.rows), [be.take(g, batch.rows) for g in gate], batch.wanted
    y = be.merge(be.attention(q, kv, counts, w.scores))
    return be.sigmoid_gate(y, gate[0]) if gate else y


def _projections(be: Backend, w: Layer, x: Array) -> Sequence[Array]:
    """Return queries (T, H*E), keys (T, G*E), values (T, G*E) and the gate if there is one, not split into heads."""
    if not w.norms_rows or w.attn_q_norm is None or w.attn_k_norm is None:
        return be.norm_project(x, w.attn_norm, w.attention)
    q, k, v = w.attention
    return (
        be.project_norm(x, q, w.attn_q_norm),
        be.project_norm(x, k, w.attn_k_norm),
        be.note(v.name, be.linear(x, v)),
    )


def mix(be: Backend, mixer: Mixer, i: int, x: Array, norm: Norm | None, batch: Batch, *, want: Wanted) -> Array | None:
    """Write the layer's state, and return the mixer's output (R, ...) of the wanted tokens; None if there are none."""
    if isinstance(mixer, ShortConv):
        b, c, h = be.norm_project(x, norm, mixer.projections)
        y = be.short_conv(batch, i, b, c, h, mixer.conv)
    else:
        h, gate, beta, step = be.norm_project(x, norm, mixer.projections)
        y = be.delta_net(batch, i, h, gate, beta, step, mixer)
    if want == "none":
        return None
    return be.take(y, batch.rows) if want == "some" else y


def feed_forward(be: Backend, w: Layer, x: Array) -> Array:
    """Return x plus the feed-forward network of the normed x, which is dense or a mixture of experts."""
    if w.experts is not None and w.ffn_norm is not None:
        return be.norm_experts_add(x, w.ffn_norm, w.experts)
    up, down = w.up_down
    if w.ffn_gate is None:
        h = be.norm_up(x, w.ffn_norm, up, w.activation)
    else:
        h = be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, up, w.activation)
    if w.post_ffw_norm is None:
        return be.project_add(h, down, x)
    return be.project_norm_add(h, down, w.post_ffw_norm, x)


def decoder_layers(
    be: Backend, x: Array, batch: Batch, *, want: Wanted, layers: Sequence[Layer], head_dim: int
) -> Array:
    """Return the hidden states after all layers: (T, D) of all tokens, or (R, D) of the wanted tokens."""
    for i, w in enumerate(layers):
        here = want if i == len(layers) - 1 else "every"
        x = decoder_layer(be, w, i, x, batch, head_dim=head_dim, want=here)
    return x


class Decoder:
    """A model: maps a batch to logits. The caller owns the KV cache. Model files derive `Model` from this class."""

    config: Any
    program: Program

    def __init__(
        self, config: Any, parameters: Parameters, backend: Backend, *, layers: Sequence[Layer], output_norm: Norm,
        logit_softcap: float | None = None,
    ) -> None:  # fmt: skip
        """Build a model.

        Args:
            config: the architecture's sizes, with at least n_layers, n_kv_heads and head_dim.
            parameters: the checkpoint's weights. If they have no matrix for the head, the embedding table is the head.
            backend: runs the operations.
            layers: the parameters of each layer.
            output_norm: the norm before the head.
            logit_softcap: logits become `logit_softcap * tanh(logit / logit_softcap)`; None for no soft cap.
        """
        self.config, self.layers, self.output_norm = config, tuple(layers), output_norm
        self.logit_softcap = logit_softcap
        self.token_embd = parameters.table("token_embd")
        self.output = parameters.linear("output" if "output.weight" in parameters else "token_embd")
        self.backend = backend

    @property
    def backend(self) -> Backend:
        """The backend. The setter compiles the layers for the backend: call it again after any change to the layers."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend, self.program = backend, backend.compile(self.definition)

    @property
    def definition(self) -> Layers:
        """The definition of all layers, as a function of a backend."""
        return partial(decoder_layers, layers=self.layers, head_dim=self.config.head_dim)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        """Return the hidden states (T, D) before the first layer."""
        return self.backend.embed(self.token_embd, ids)

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the wanted tokens, or None if there are none.

        The pass writes keys and values of all new tokens. The caller then commits the batch, or rolls it back.
        """
        x = self.backend.note("embed", self.embed(batch.ids, batch.positions))
        x = self.program.run(x, batch)
        return None if batch.want == "none" else self._logits(x)

    def _logits(self, x: Array) -> Array:
        """Return logits (R, V) of the hidden states (R, D) after the last layer."""
        logits = self.backend.norm_head(x, self.output_norm, self.output)
        return logits if self.logit_softcap is None else self.backend.soft_cap(logits, self.logit_softcap)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer keeps of a sequence, for `KVPool`: KV heads, head dim and window, or a state."""
        cfg = self.config
        return [
            KVLayer(cfg.n_kv_heads, cfg.head_dim, w.window) if w.mixer is None else StateLayer(w.mixer.state)
            for w in self.layers
        ]

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; the options are those of `KVPool`."""
        return KVPool(self.backend, self.kv_layers, n_tokens, **options)

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return the empty KV cache of a sequence of at most `n_tokens` tokens, in a pool of its own."""
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty KV cache for a single pass of `n_tokens` tokens. It takes less memory than `new_kv`."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)
