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
from mlx_engine.backends.batch import Batch, KVView, Wanted
from mlx_engine.backends.experts import Experts
from mlx_engine.backends.parameters import Array, Columns, Layer, Linear, Mixer, Norm, PerLayer, ShortConv, Token
from mlx_engine.backends.program import Layers, Program
from mlx_engine.cache import CacheLayer, KVLayer, KVPool, KVSequence, StateLayer
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.stage import Stage


def decoder_layer(
    be: Backend, w: Layer, i: int, x: Array, batch: Batch, *, head_dim: int, want: Wanted, views: dict[int, KVView],
    inputs: Array,
) -> Array:  # fmt: skip
    """Return the hidden states after layer i: (T, D) of all tokens, or (R, D) of the wanted tokens.

    If no token is wanted, keys and values (or the state) are written and x is returned unchanged.

    Args:
        be: the backend, which runs the operations.
        w: the layer's parameters.
        i: the layer's index.
        x: hidden states (T, D) before the layer.
        batch: the new tokens, and the slots of their keys and values.
        head_dim: E, unless the layer has its own.
        want: which tokens are wanted: "every", "some" (the rows in `batch.rows`) or "none". Queries, keys and values
            are computed for all tokens, attention and the FFN for wanted tokens only.
        views: the keys and values of earlier layers, by layer; this layer adds its own.
        inputs: (T, L*I), the layers' own inputs; other models do not read it.
    """
    if w.mixer is None:
        y = attend(be, w, i, x, batch, head_dim=w.head_dim or head_dim, want=want, views=views)
    else:
        y = mix(be, w.mixer, i, x, w.attn_norm, batch, want=want)
    if y is None:
        return x
    if want == "some":
        x = be.take(x, batch.rows)
    be.note(f"blk.{i}.attn_out", y)
    x = project_add(be, y, w.attn_output, w.post_attention_norm, x)
    x = feed_forward(be, w, be.note(f"blk.{i}.attn_residual", x))
    if w.per_layer is not None:
        own = be.columns(inputs, *w.per_layer.columns)
        x = add_input(be, w.per_layer, x, be.take(own, batch.rows) if want == "some" else own)
    if w.output_scale != 1:
        x = be.scale(x, w.output_scale)
    return be.note(f"blk.{i}.layer_out", x)


def attend(
    be: Backend, w: Layer, i: int, x: Array, batch: Batch, *, head_dim: int, want: Wanted, views: dict[int, KVView]
) -> Array | None:
    """Write keys and values, and return attention (R, H*E) of the wanted tokens; None if there are none."""
    q, *gate = _queries_and_keys(be, w, i, x, batch, head_dim, views)
    kv, counts = views[i if w.shares is None else w.shares], batch.lengths
    if want == "none" or w.scores is None:
        return None
    if want == "some":
        q, gate, counts = be.take(q, batch.rows), [be.take(g, batch.rows) for g in gate], batch.wanted
    y = be.merge(be.attention(q, kv, counts, w.scores))
    return be.sigmoid_gate(y, gate[0]) if gate else y


def _queries_and_keys(
    be: Backend, w: Layer, i: int, x: Array, batch: Batch, head_dim: int, views: dict[int, KVView]
) -> list[Array]:
    """Return queries (T, H, E), and the gate (T, H*E) if there is one; write keys and values, if they are its own."""
    if w.shares is not None and w.attn_q_norm is not None:
        (q,) = be.norm_project(x, w.attn_norm, w.attention)
        return [be.note(f"blk.{i}.q_rope", be.norm_rope(q, head_dim, w.attn_q_norm, w.rope, batch.positions))]
    q, k, v, *gate = _projections(be, w, x)
    normed = None if w.attn_v_norm is None else be.norm_rope(v, head_dim, w.attn_v_norm, None, batch.positions)
    if w.rope is None:
        q, k, v = be.heads(q, head_dim), be.heads(k, head_dim), be.heads(v, head_dim)
    else:
        q, k, v = be.head_norm_rope(q, k, v, head_dim, w.head_norms, w.rope, batch.positions)
        be.note(f"blk.{i}.q_rope", q)
        be.note(f"blk.{i}.k_rope", k)
    views[i] = be.kv_append(batch, i, k, v if normed is None else normed)
    return [q, *gate]


def _projections(be: Backend, w: Layer, x: Array) -> Sequence[Array]:
    """Return queries (T, H*E), keys (T, G*E), values (T, G*E) and the gate if there is one, not split into heads."""
    if not w.norms_rows or w.attn_q_norm is None or w.attn_k_norm is None:
        q, k, *rest = be.norm_project(x, w.attn_norm, w.attention)
        return [q, k, k] if w.attn_v is None else [q, k, *rest]
    of_q, of_k, of_v = w.attention
    own_q, own_k = w.own_columns or (None, None)
    return (
        _normed_row(be, x, of_q, w.attn_q_norm, own_q),
        _normed_row(be, x, of_k, w.attn_k_norm, own_k),
        be.note(of_v.name, be.linear(x, of_v)),
    )


def _normed_row(be: Backend, x: Array, linear: Linear, norm: Norm, own: Columns | None) -> Array:
    """Return a projection whose rows are normed whole; with `own`, this rank's columns of the rows of all ranks."""
    if own is None:
        return be.project_norm(x, linear, norm)
    if own.are_all_here:
        return be.columns(be.project_norm(x, linear, norm), own.first, own.last)
    rows = be.note(linear.name, be.all_columns(be.linear(x, linear), own.of))
    return be.columns(be.norm(rows, norm), own.first, own.last)


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


def add_input(be: Backend, w: PerLayer, x: Array, own: Array) -> Array:
    """Return x plus the layer's own input, gated by x, projected and normed."""
    gated = be.multiply(be.norm_up(x, None, w.gate, "gelu"), own)
    return be.project_norm_add(gated, w.projection, w.norm, x)


def feed_forward(be: Backend, w: Layer, x: Array) -> Array:
    """Return x plus the feed-forward network of the normed x: dense, a mixture of experts, or both side by side."""
    if w.experts is not None and w.ffn_norm is not None and w.ffn_up is None:
        return mixture_add(be, x, w.ffn_norm, w.experts, x)
    up, down = w.up_down
    if w.ffn_gate is None:
        h = be.norm_up(x, w.ffn_norm, up, w.activation)
    else:
        h = be.norm_gate_up(x, w.ffn_norm, w.ffn_gate, up, w.activation)
    if w.experts is None or w.pre_ffw_norm_2 is None or w.post_ffw_norm_1 is None:
        return project_add(be, h, down, w.post_ffw_norm, x)
    if down.is_partial:
        dense = be.norm(whole_product(be, h, down), w.post_ffw_norm_1)
    else:
        dense = be.project_norm(h, down, w.post_ffw_norm_1)
    return be.norm_add(mixture_add(be, x, w.pre_ffw_norm_2, w.experts, dense), w.post_ffw_norm, x)


def project_add(be: Backend, x: Array, projection: Linear, norm: Norm | None, residual: Array) -> Array:
    """Return `residual + norm(projection(x))`. If this rank has a part of the columns, the parts of all are added."""
    if projection.is_partial:
        return be.norm_add(whole_product(be, x, projection), norm, residual)
    if norm is None:
        return be.project_add(x, projection, residual)
    return be.project_norm_add(x, projection, norm, residual)


def whole_product(be: Backend, x: Array, projection: Linear) -> Array:
    """Return the sum of the products of all ranks, each with its columns of a projection."""
    return be.note(projection.name, be.all_sum(be.linear(x, projection)))


def mixture_add(be: Backend, x: Array, norm: Norm, experts: Experts, residual: Array) -> Array:
    """Return the residual plus a mixture of experts, of which each rank may have a part."""
    if not experts.down.is_partial:
        return be.norm_experts_add(x, norm, experts, None if residual is x else residual)
    return be.norm_add(be.all_sum(be.norm_experts(x, norm, experts)), experts.post_norm, residual)


def decoder_layers(
    be: Backend, x: Array, batch: Batch, *, want: Wanted, layers: Sequence[Layer], head_dim: int
) -> Array:
    """Return the hidden states after all layers: (T, D) of all tokens, or (R, D) of the wanted tokens.

    If layers have inputs of their own, x is (T, D + L*I): the hidden states, and after them the inputs of all layers.
    """
    views, inputs = dict[int, KVView](), x
    if layers[0].per_layer is not None and layers[-1].per_layer is not None:
        n = layers[0].per_layer.hidden_size
        x, inputs = be.columns(inputs, 0, n), be.columns(inputs, n, n + layers[-1].per_layer.columns[1])
    if want == "none":  # no later pass reads what layers after the last keys and values compute
        layers = layers[: 1 + max(i for i, w in enumerate(layers) if w.shares is None)]
    for i, w in enumerate(layers):
        here = want if i == len(layers) - 1 else "every"
        x = decoder_layer(be, w, i, x, batch, head_dim=head_dim, want=here, views=views, inputs=inputs)
    return x


# The values whose names `decoder_layer` makes from the index of a layer in its stage.
COUNTED = ("q_rope", "k_rope", "attn_out", "attn_residual", "layer_out")


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
            layers: the parameters of each layer; only those of the process's stage are kept.
            output_norm: the norm before the head.
            logit_softcap: logits become `logit_softcap * tanh(logit / logit_softcap)`; None for no soft cap.
        """
        self.stage = parameters.stage or Stage(0, len(layers), len(layers))
        layers = parameters.layers(layers)
        self.config, self.layers, self.output_norm = config, self.stage.cut(layers), output_norm
        self.whole_kv_layers = _kv_layers(config, layers)
        self.logit_softcap = logit_softcap
        head = "output" if "output.weight" in parameters else "token_embd"
        # A tied head may be converted, and then is another array than the table: a stage prepares what it uses alone.
        self.token_embd = parameters.table("token_embd") if self.stage.is_first else parameters.elsewhere("token_embd")
        self.output = parameters.linear(head) if self.stage.is_last else Linear(head, parameters.elsewhere(head))
        self.backend = backend

    @property
    def backend(self) -> Backend:
        """The backend. The setter compiles the layers for the backend: call it again after any change to the layers."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend, self.program = backend, backend.compile(self.definition, self.width)

    @property
    def width(self) -> int:
        """The width of the input of the first layer: D, plus the widths of the layers' own inputs."""
        own = self.layers[-1].per_layer
        return int(self.config.hidden_size) + (0 if own is None else own.columns[1])

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
        return None if batch.want == "none" else self.head(x, batch.best)

    def head(self, x: Array, best: int | None = None) -> Array:
        """Return logits (R, V) of the hidden states (R, D) after the last layer; see `Batch.best`."""
        be, n = self.backend, int(self.config.vocab_size)
        logits = be.norm_head(x, self.output_norm, self.output)
        if self.logit_softcap is not None:
            logits = be.soft_cap(logits, self.logit_softcap)
        if be.group is None:
            return logits
        return be.all_columns(logits, n) if best is None else be.all_best(logits, n, best)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer of the stage keeps of a sequence, for `KVPool`: KV heads, head dim and window, or a state."""
        return self.whole_kv_layers[self.stage.first : self.stage.end]

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; the options are those of `KVPool`."""
        return KVPool(self.backend, self.kv_layers, n_tokens, **options)

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return the empty KV cache of a sequence of at most `n_tokens` tokens, in a pool of its own."""
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty KV cache for a single pass of `n_tokens` tokens. It takes less memory than `new_kv`."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)


def _kv_layers(config: Any, layers: Sequence[Layer]) -> list[CacheLayer]:
    """Return what each layer of a model keeps of a sequence.

    Layers that share keys and values are the last ones, so that a layer's index is that of its store.
    """
    return [
        KVLayer(w.n_kv_heads or config.n_kv_heads, w.head_dim or config.head_dim, w.window)
        if w.mixer is None
        else StateLayer(w.mixer.state)
        for w in layers
        if w.shares is None
    ]
