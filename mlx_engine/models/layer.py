"""One decoder layer: its parameters, and its definition in the operations of a backend.

`decoder_layer` is the definition, for all architectures and backends. A layer usually has one token mixer (`Attention`,
`LatentAttention`, `SharedAttention`, `ShortConv`, `DeltaNet` or `Mamba2`) and one feed-forward network (`Gated`,
`Plain`, `Mixture` or `GatedAndMixture`). Each kind is a class with its parameters, and a function that runs it. To add
a kind, add a class, a function, and a case in `mix` or `feed_forward`.

With tensor parallelism, a rank (process) may have only some input columns of a matrix (`Linear.is_partial`). The
functions below then add the products of all ranks (`Backend.all_sum`).

Of the T tokens of a pass, the R *wanted* tokens (`Batch.rows`) are those whose logits or hidden states the caller
needs. The last layer computes attention and FFN for these tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch, KVView, Wanted
from mlx_engine.backends.experts import ExpertLinear, Experts
from mlx_engine.backends.parameters import (
    Activation,
    Array,
    Convolution,
    DeltaNet,
    HeadNorms,
    Linear,
    Mamba2,
    Norm,
    RMSNorm,
    Rope,
    Scores,
)
from mlx_engine.kernels.cached import cached_property
from mlx_engine.weights.adapters import adapted
from mlx_engine.weights.parameters import Parameters

# The functions below report intermediate values under names such as "blk.0.q_rope". In names with these endings, layer
# 0 is the first layer of the pipeline stage; `distributed/leader.py` adds the index of this first layer in the model.
COUNTED = ("q_rope", "k_rope", "attn_out", "attn_residual", "layer_out")


class LayerTensors(NamedTuple):
    """The tensors of layer i: `linear("attn_q")` reads `blk.{i}.attn_q`.

    Attributes:
        eps: the epsilon of the norms that the methods return.
        layer_norms: whether norms without a bias are layer norms. Norms with a bias are always layer norms.
    """

    p: Parameters
    i: int
    eps: float
    layer_norms: bool = False

    @classmethod
    def of(cls, p: Parameters, n_layers: int, eps: float, *, layer_norms: bool = False) -> list[LayerTensors]:
        return [cls(p, i, eps, layer_norms) for i in range(n_layers)]

    def has(self, part: str) -> bool:
        """Return whether the layer has the tensor `blk.{i}.{part}.weight`."""
        return f"blk.{self.i}.{part}.weight" in self.p

    def linear(self, part: str) -> Linear:
        return self.p.linear(f"blk.{self.i}.{part}")

    def linear_or_none(self, part: str) -> Linear | None:
        return self.linear(part) if self.has(part) else None

    def norm(self, part: str) -> Norm:
        return self.p.norm(f"blk.{self.i}.{part}", self.eps, is_layer_norm=self.layer_norms)

    def norm_or_none(self, part: str) -> Norm | None:
        return self.norm(part) if self.has(part) else None

    def rms_norm(self, part: str, times: float = 1.0) -> RMSNorm:
        """Return an RMS norm with its weight multiplied by `times`."""
        return self.p.rms_norm(f"blk.{self.i}.{part}", self.eps, times)


# ---- token mixers ----


class Columns(NamedTuple):
    """The columns [first, last) of a projection's output that this rank uses; the whole output has `of` columns.

    Attributes:
        are_all_here: whether this rank has the weights of all `of` columns, so that ranks need not exchange columns.
    """

    first: int
    last: int
    of: int
    are_all_here: bool = False


@dataclass(frozen=True, eq=False)
class RowNorms:
    """Norms of whole rows of queries (T, H*E) and keys (T, G*E), before they are split into heads.

    Attributes:
        columns: the columns of queries and of keys that this rank uses; None for all.
    """

    q: RMSNorm
    k: RMSNorm
    columns: tuple[Columns, Columns] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """Attention to the keys and values of this layer.

    Attributes:
        v: the projection to values. If the values are the keys before norm and RoPE, `v` is the same object as `k`.
        gate: the projection to the gate; the output of attention is multiplied by the gate's sigmoid.
        norms: the norms of query and key heads, or of whole rows.
        window: number of latest tokens that a token attends to, itself included; None for all tokens. A negative number
            -C means chunks of C tokens: a token attends to the earlier tokens of its chunk, and to itself.
    """

    q: Linear
    k: Linear
    v: Linear
    gate: Linear | None = None
    norms: HeadNorms | RowNorms = None
    v_norm: RMSNorm | None = None
    rope: Rope | None = None
    scores: Scores
    head_dim: int
    n_kv_heads: int
    window: int | None = None
    norms_after_rope: bool = False

    @classmethod
    def read(
        cls, t: LayerTensors, config: Any, rope: Rope | None, scores: Scores | None = None, window: int | None = None
    ) -> Attention:
        """Read the parameters of attention. Without `scores`, the scale of the scores is `head_dim ** -0.5`."""
        q, k = t.linear("attn_q"), t.linear("attn_k")
        v, gate = t.linear_or_none("attn_v"), t.linear_or_none("attn_gate")
        norms: HeadNorms | RowNorms = None
        if t.has("attn_q_norm"):
            norms = t.rms_norm("attn_q_norm"), t.rms_norm("attn_k_norm")
            # If the norm weight has size E (the head dim), each head is normed; if longer, whole rows are normed.
            norms = norms if t.p.size(f"blk.{t.i}.attn_q_norm") == config.head_dim else RowNorms(*norms)
        return cls(
            q=q, k=k, v=v or k, gate=gate, norms=norms, rope=rope, scores=scores or Scores(config.head_dim**-0.5),
            head_dim=config.head_dim, n_kv_heads=config.n_kv_heads, window=window,
            norms_after_rope=config.norms_after_rope,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedAttention:
    """Attention to the keys and values of an earlier layer.

    Attributes:
        layer: the index of the layer whose keys and values are read: the last layer with this window that computes keys
            and values. It must be the last one: if `Stores.are_kept` is False (`backends/batch.py`), layers with the
            same window may share memory, which then has only the last layer's keys and values.
    """

    q: Linear
    norm: RMSNorm
    rope: Rope | None
    scores: Scores
    head_dim: int
    layer: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentAttention:
    """Multi-head latent attention (MLA): the cache has a latent and a rotated key per token, for all heads together.

    This is the absorbed form: a head's score is `(k_b q) . latent + q_pe . k_pe`, and its output is `v_b (sum of
    weights * latents)`, with the weights of the softmax. So the matrices from latent to keys and values are applied
    to each query, not to each cached token. Sizes: L elements of the latent; H heads; V elements of a value head; D
    hidden size. A query head has N elements that are not rotated, and R that are (in this class, R is not the number of
    wanted tokens). Source: "DeepSeek-V2", arXiv 2405.04434.

    Attributes:
        q_a: the projection to the latent of queries, which is normed by `q_norm`; None if `q` and `q_pe` read the
            hidden states directly.
        q: the projection to the queries' elements that are not rotated (H*N).
        q_pe: the projection to the queries' rotated elements (H*R).
        latent: the projection (L, D) to the latent, which is normed by `norm`.
        k_pe: the projection (R, D) to the rotated part of keys, which all heads share.
        k_b: for each head, the transpose (L, N) of the matrix from the latent to keys.
        v_b: for each head, the matrix (V, L) from the latent to values.
        head_dim: L + R, the number of cached elements per token.
    """

    q_a: Linear | None
    q_norm: RMSNorm | None
    q: Linear
    q_pe: Linear
    latent: Linear
    norm: RMSNorm
    k_pe: Linear
    k_b: ExpertLinear
    v_b: ExpertLinear
    rope: Rope
    scores: Scores
    head_dim: int

    @cached_property
    def growth(self) -> Rope:
        """A `Rope` that only applies `Rope.growth`, for the N elements of a query head that are not rotated."""
        return replace(Rope.none(self.k_b.shape[1]), growth=self.rope.growth)


@dataclass(frozen=True, eq=False)
class ShortConv:
    """A gated short convolution.

    Attributes:
        projections: the projections to the gate of the input, to the gate of the output, and to the input. Each is
            (C, D), for C channels.
        conv: the convolution over W tokens.
        state: a tuple of one shape, (W - 1, C): the state has the last inputs of the convolution.
    """

    projections: tuple[Linear, Linear, Linear]
    conv: Convolution
    state: tuple[tuple[int, ...]]


Mixer: TypeAlias = Attention | LatentAttention | SharedAttention | ShortConv | DeltaNet | Mamba2
Views: TypeAlias = dict[int, KVView]


def mix(
    be: Backend, w: Mixer, i: int, x: Array, norm: Norm | None, batch: Batch, want: Wanted, views: Views
) -> Array | None:
    """Run layer i's token mixer on hidden states x (T, D).

    Apply `norm` to x first, unless it is None. Write the keys and values, or the state, that the mixer computes. Return
    the mixer's output (R, ...) for the R wanted tokens, or None if no token is wanted.
    """
    match w:
        case Attention():
            return attention(be, w, i, x, norm, batch, want, views)
        case LatentAttention():
            return latent_attention(be, w, i, x, norm, batch, want, views)
        case SharedAttention():
            return shared_attention(be, w, i, x, norm, batch, want, views)
        case ShortConv():
            return wanted(be, short_conv(be, w, i, x, norm, batch), batch, want)
        case DeltaNet():
            return wanted(be, delta_net(be, w, i, x, norm, batch), batch, want)
        case Mamba2():
            return wanted(be, mamba2(be, w, i, x, norm, batch), batch, want)


def attention(
    be: Backend, w: Attention, i: int, x: Array, norm: Norm | None, batch: Batch, want: Wanted, views: Views
) -> Array | None:
    """Write keys and values; return the attention output (R, H*E)."""
    if isinstance(w.norms, RowNorms):
        q, k, v, *gate = row_normed_projections(be, w, w.norms, be.norm(x, norm))
    else:
        q, k, v, *gate = projections(be, w, norm, x)
    normed = None if w.v_norm is None else be.norm_rope(v, w.head_dim, w.v_norm, None, batch.positions)
    q, k, v = heads(be, w, i, q, k, v, batch.positions)
    views[i] = be.kv_append(batch, i, k, v if normed is None else normed)
    return attend(be, w.scores, q, gate, views[i], batch, want)


def projections(be: Backend, w: Attention, norm: Norm | None, x: Array) -> Sequence[Array]:
    """Return queries (T, H*E), keys (T, G*E), values (T, G*E), and the gate (T, H*E) if `w` has a gate."""
    values, gates = [] if w.v is w.k else [w.v], [] if w.gate is None else [w.gate]
    q, k, *rest = be.norm_project(x, norm, [w.q, w.k, *values, *gates])
    return [q, k, *rest] if values else [q, k, k, *rest]


def row_normed_projections(be: Backend, w: Attention, norms: RowNorms, x: Array) -> Sequence[Array]:
    """Return the arrays that `projections` returns, with each whole row of queries and keys normed."""
    of_q, of_k = norms.columns or (None, None)
    return (
        row_normed(be, x, w.q, norms.q, of_q),
        row_normed(be, x, w.k, norms.k, of_k),
        *(be.note(linear.name, be.linear(x, linear)) for linear in (w.v, w.gate) if linear is not None),
    )


def row_normed(be: Backend, x: Array, linear: Linear, norm: Norm, own: Columns | None) -> Array:
    """Return a projection with each whole row normed; with `own`, only this rank's columns of the result."""
    if own is None:
        return be.project_norm(x, linear, norm)
    if own.are_all_here:
        return be.columns(be.project_norm(x, linear, norm), own.first, own.last)
    rows = be.note(linear.name, be.all_columns(be.linear(x, linear), own.of))
    return be.columns(be.norm(rows, norm), own.first, own.last)


def heads(
    be: Backend, w: Attention, i: int, q: Array, k: Array, v: Array, positions: Sequence[int]
) -> tuple[Array, Array, Array]:
    """Return queries (T, H, E), keys and values (T, G, E); queries and keys are normed per head, and rotated."""
    norms = None if isinstance(w.norms, RowNorms) else w.norms
    if norms is None and w.rope is None:
        return be.heads(q, w.head_dim), be.heads(k, w.head_dim), be.heads(v, w.head_dim)
    rope = w.rope or Rope.none(w.head_dim)
    if norms is not None and w.norms_after_rope:
        q, k = (
            be.norm_rope(
                be.merge(be.norm_rope(x, w.head_dim, None, rotation, positions)), w.head_dim, norm, None, positions
            )
            for x, norm, rotation in ((q, norms[0], rope), (k, norms[1], rope.keys))
        )
        v = be.heads(v, w.head_dim)
    else:
        q, k, v = be.head_norm_rope(q, k, v, w.head_dim, norms, rope, positions)
    return be.note(f"blk.{i}.q_rope", q), be.note(f"blk.{i}.k_rope", k), v


def shared_attention(
    be: Backend, w: SharedAttention, i: int, x: Array, norm: Norm | None, batch: Batch, want: Wanted, views: Views
) -> Array | None:
    """Return the attention output (R, H*E), from the keys and values of an earlier layer."""
    (q,) = be.norm_project(x, norm, [w.q])
    q = be.note(f"blk.{i}.q_rope", be.norm_rope(q, w.head_dim, w.norm, w.rope, batch.positions))
    return attend(be, w.scores, q, [], views[w.layer], batch, want)


def latent_attention(
    be: Backend, w: LatentAttention, i: int, x: Array, norm: Norm | None, batch: Batch, want: Wanted, views: Views
) -> Array | None:
    """Write latents; return the attention output (R, H*V)."""
    if w.q_a is None:
        latent, k_pe, q, q_pe = be.norm_project(x, norm, [w.latent, w.k_pe, w.q, w.q_pe])
    else:
        latent, k_pe, a = be.norm_project(x, norm, [w.latent, w.k_pe, w.q_a])
        q, q_pe = be.norm_project(a, w.q_norm, [w.q, w.q_pe])
    (n_latent, n), n_rotated = w.k_b.shape, 2 * len(w.rope.frequencies)
    q_pe = be.norm_rope(q_pe, n_rotated, None, w.rope, batch.positions)
    k_pe = be.norm_rope(k_pe, n_rotated, None, w.rope.keys, batch.positions)
    k = be.join_heads(be.heads(be.norm(latent, w.norm), n_latent), k_pe)
    q = be.heads(q, n) if w.rope.growth is None else be.norm_rope(q, n, None, w.growth, batch.positions)
    q = be.join_heads(be.note(w.k_b.name, be.head_linear(q, w.k_b)), q_pe)
    views[i] = be.kv_append(batch, i, be.note(f"blk.{i}.k_rope", k), k)
    if want == "none":
        return None
    counts = batch.lengths
    if want == "some":
        q, counts = be.take(q, batch.rows), batch.wanted
    y = be.attention(be.note(f"blk.{i}.q_rope", q), views[i], counts, w.scores)
    return be.merge(be.note(w.v_b.name, be.head_linear(y, w.v_b)))


def attend(
    be: Backend, scores: Scores, q: Array, gate: Sequence[Array], kv: KVView, batch: Batch, want: Wanted
) -> Array | None:
    """Return the attention output (R, H*E), times the sigmoid of the gate if there is a gate."""
    if want == "none":
        return None
    counts = batch.lengths
    if want == "some":
        q, gate, counts = be.take(q, batch.rows), [be.take(g, batch.rows) for g in gate], batch.wanted
    y = be.merge(be.attention(q, kv, counts, scores))
    return be.sigmoid_gate(y, gate[0]) if gate else y


def short_conv(be: Backend, w: ShortConv, i: int, x: Array, norm: Norm | None, batch: Batch) -> Array:
    """Return the output (T, C) of a gated short convolution for every token, and write the state."""
    b, c, h = be.norm_project(x, norm, w.projections)
    return be.short_conv(batch, i, b, c, h, w.conv)


def delta_net(be: Backend, w: DeltaNet, i: int, x: Array, norm: Norm | None, batch: Batch) -> Array:
    """Return the output (T, H*P) of a gated delta net for every token, and write the state; P is the value head dim."""
    h, gate, beta, step = be.norm_project(x, norm, w.projections)
    return be.delta_net(batch, i, h, gate, beta, step, w)


def mamba2(be: Backend, w: Mamba2, i: int, x: Array, norm: Norm | None, batch: Batch) -> Array:
    """Return the output (T, H*P) of a Mamba2 mixer for every token, and write the state; P is the value head dim."""
    (projected,) = be.norm_project(x, norm, [w.projection])
    inner, channels = w.space.n_heads * w.space.head_dim, w.state[0][1]
    gate = scaled(be, be.columns(projected, 0, inner), w.scales[0])
    mixed = be.columns(projected, inner, inner + channels)
    step = be.columns(projected, inner + channels, inner + channels + w.space.n_heads)
    return be.mamba2(batch, i, gate, mixed, scaled(be, step, w.scales[1]), w)


def scaled(be: Backend, x: Array, factor: float) -> Array:
    return x if factor == 1 else be.scale(x, factor)


def wanted(be: Backend, y: Array, batch: Batch, want: Wanted) -> Array | None:
    """Return the rows of the wanted tokens; None if no token is wanted."""
    if want == "none":
        return None
    return be.take(y, batch.rows) if want == "some" else y


# ---- feed-forward networks ----


@dataclass(frozen=True, eq=False)
class Gated:
    """`down(activation(gate(h)) * up(h))`, where h is the normed x.

    Attributes:
        post: the norm of the output, if the output is normed.
        scales: the factor of `gate(h)` before the activation, and the factor of the input of `down`. If one of them is
            not 1, the activation must be SiLU.
    """

    norm: Norm | None
    gate: Linear
    up: Linear
    down: Linear
    post: Norm | None = None
    activation: Activation = "silu"
    scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def read(cls, t: LayerTensors, activation: Activation = "silu") -> Gated:
        norm, gate, up, down = t.norm_or_none("ffn_norm"), *(t.linear(f"ffn_{part}") for part in ("gate", "up", "down"))
        return cls(norm, gate, up, down, t.norm_or_none("post_ffw_norm"), activation)


@dataclass(frozen=True, eq=False)
class Plain:
    """`down(activation(up(h)))`, where h is the normed x."""

    norm: Norm | None
    up: Linear
    down: Linear
    activation: Activation


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of experts that reads the normed x."""

    norm: Norm
    experts: Experts


@dataclass(frozen=True, eq=False)
class GatedAndMixture:
    """A gated network and a mixture of experts that both read x. Both outputs are normed, and so is their sum."""

    gated: Gated
    gated_post: Norm
    mixture: Mixture
    post: Norm


FeedForward: TypeAlias = Gated | Plain | Mixture | GatedAndMixture


def feed_forward(be: Backend, w: FeedForward, of: Array, x: Array) -> Array:
    """Return x plus the output of the FFN.

    The FFN reads `of`: the hidden states before the mixers if `Layer.is_parallel`, else x.
    """
    match w:
        case Gated():
            return project_add(be, gated(be, w, of), w.down, w.post, x)
        case Plain():
            return project_add(be, be.norm_up(of, w.norm, w.up, w.activation), w.down, None, x)
        case Mixture():
            return mixture_add(be, w, of, x)
        case GatedAndMixture():
            y = project_norm(be, gated(be, w.gated, of), w.gated.down, w.gated_post)
            return be.norm_add(mixture_add(be, w.mixture, of, y), w.post, x)


def gated(be: Backend, w: Gated, x: Array) -> Array:
    """Return the inner activations (R, F) of a gated network for x (R, D)."""
    if w.scales != (1.0, 1.0):
        gate, up = be.norm_project(x, w.norm, [w.gate, w.up])
        gate = scaled(be, gate, w.scales[0])
        return scaled(be, be.multiply(be.sigmoid_gate(gate, gate), up), w.scales[1])
    return be.norm_gate_up(x, w.norm, w.gate, w.up, w.activation)


def mixture_add(be: Backend, w: Mixture, x: Array, residual: Array) -> Array:
    """Return the residual plus the output of a mixture of experts for x."""
    if not w.experts.down.is_partial:
        return be.norm_experts_add(x, w.norm, w.experts, None if residual is x else residual)
    return be.norm_add(be.all_sum(be.norm_experts(x, w.norm, w.experts)), w.experts.post_norm, residual)


# ---- layers ----


@dataclass(frozen=True, eq=False)
class PerLayer:
    """A per-layer input h (T, I), as in Gemma 4: the layer adds `norm(projection(gelu(gate(x)) * h))` to its output x.

    Attributes:
        hidden_size: D, the column at which `decoder_layers` (`decoder.py`) splits hidden states from per-layer inputs.
        columns: the columns [first, end) of h in the array (T, L*I) of the inputs of all L layers.
        gate: (I, D).
        projection: (D, I).
    """

    hidden_size: int
    columns: tuple[int, int]
    gate: Linear
    projection: Linear
    norm: RMSNorm


@dataclass(frozen=True, eq=False)
class Branch:
    """A token mixer and the projection of its output: the layer adds `post(out(scale * mix(...)))` to x."""

    mix: Mixer
    out: Linear
    post: Norm | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The parameters of a layer.

    Attributes:
        norm: the norm of the mixers' input.
        branches: the token mixers, which all read the same input; empty for a layer with only an FFN.
        ffn: the feed-forward network; None for a layer with only a mixer.
        input: the per-layer input, added after the FFN.
        scale: factor of the hidden states after the layer.
        is_parallel: whether the FFN reads the hidden states before the mixers, not the ones after them.
    """

    norm: Norm | None = None
    branches: tuple[Branch, ...] = ()
    ffn: FeedForward | None = None
    input: PerLayer | None = None
    scale: float = 1.0
    is_parallel: bool = False

    @property
    def mix(self) -> Mixer | None:
        """The first mixer."""
        return self.branches[0].mix if self.branches else None

    def with_mixers(self, change: Callable[[Any], Mixer]) -> Layer:
        """Return the layer with each mixer replaced by `change(mixer)`."""
        return replace(self, branches=tuple(replace(branch, mix=change(branch.mix)) for branch in self.branches))

    def counted_from(self, first: int) -> Layer:
        """Return the layer with `SharedAttention.layer` and `PerLayer.columns` counted from layer `first`.

        `first` is the first layer of a pipeline stage. `SharedAttention.layer` never becomes negative, because layers
        that share keys and values are in one stage.
        """
        if not first:
            return self
        layer = self.with_mixers(lambda m: replace(m, layer=m.layer - first) if isinstance(m, SharedAttention) else m)
        if self.input is None:
            return layer
        start, end = self.input.columns
        skipped = first * (end - start)
        return replace(layer, input=replace(self.input, columns=(start - skipped, end - skipped)))


def decoder_layer(
    be: Backend,
    w: Layer,
    i: int,
    x: Array,
    batch: Batch,
    *,
    want: Wanted,
    views: Views,
    inputs: Array,
    masks: Array | None = None,
) -> Array:
    """Return the hidden states after layer i: (T, D) of all tokens, or (R, D) of the wanted tokens.

    Args:
        be: the backend.
        w: the layer's parameters.
        i: the layer's index.
        x: hidden states (T, D) before the layer.
        batch: the new tokens, and the places of their keys and values in the KV cache.
        want: which tokens are wanted: "every", "some" (the rows in `batch.rows`) or "none". For "none", keys and values
            (or the state) are written, and x is returned unchanged. Queries, keys and values are computed for all
            tokens, but attention and the FFN only for wanted tokens. A mixer with a state computes its output for all
            tokens.
        views: the KV views of earlier layers, by layer; this layer adds its own view.
        inputs: (T, L*I), the per-layer inputs of all layers; not read if `w.input` is None.
        masks: (T, M), which of the M columns of the stacked LoRA adapters each token uses (`weights/adapters.py`).
    """
    inner = adapted(be, masks)
    mixed = [mix(inner, of.mix, i, x, w.norm, batch, want, views) for of in w.branches]
    if want == "none":
        return x
    if want == "some":
        x, masks = be.take(x, batch.rows), None if masks is None else be.take(masks, batch.rows)
    be = adapted(be, masks)
    before, x = x, add_mixed(be, w.branches, i, mixed, x)
    if w.ffn is not None:
        x = feed_forward(be, w.ffn, before if w.is_parallel else x, x)
    if w.input is not None:
        own = be.columns(inputs, *w.input.columns)
        x = add_input(be, w.input, x, be.take(own, batch.rows) if want == "some" else own)
    if w.scale != 1:
        x = be.scale(x, w.scale)
    return be.note(f"blk.{i}.layer_out", x)


def add_mixed(be: Backend, branches: Sequence[Branch], i: int, mixed: Sequence[Any], x: Array) -> Array:
    """Return x plus the projected outputs of the layer's mixers."""
    outputs = [scaled(be, y, branch.scale) for y, branch in zip(mixed, branches, strict=True)]
    for n, (y, branch) in enumerate(zip(outputs, branches, strict=True)):
        if n == 0:
            be.note(f"blk.{i}.attn_out", y)
        x = project_add(be, y, branch.out, branch.post, x)
    return be.note(f"blk.{i}.attn_residual", x) if branches else x


def add_input(be: Backend, w: PerLayer, x: Array, own: Array) -> Array:
    """Return x plus the per-layer input `own` (R, I), which is gated by x, projected and normed."""
    y = be.multiply(be.norm_up(x, None, w.gate, "gelu"), own)
    return be.project_norm_add(y, w.projection, w.norm, x)


def project_norm(be: Backend, x: Array, projection: Linear, norm: Norm) -> Array:
    """Return `norm(projection(x))`."""
    if projection.is_partial:
        return be.norm(whole_product(be, x, projection), norm)
    return be.project_norm(x, projection, norm)


def project_add(be: Backend, x: Array, projection: Linear, norm: Norm | None, residual: Array) -> Array:
    """Return `residual + norm(projection(x))`."""
    if projection.is_partial:
        return be.norm_add(whole_product(be, x, projection), norm, residual)
    if norm is None:
        return be.project_add(x, projection, residual)
    return be.project_norm_add(x, projection, norm, residual)


def whole_product(be: Backend, x: Array, projection: Linear) -> Array:
    """Return the full product of a projection whose input columns are split: the sum of all ranks' partial products."""
    return be.note(projection.name, be.all_sum(be.linear(x, projection)))
