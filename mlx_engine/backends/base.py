"""The interface between models and backends: the operations that models call and backends implement.

There are two levels of operations. *Primitives* (`primitives.py`) are abstract: every backend implements all of them.
*Blocks* are groups of operations that are worth fusing. `Backend` composes each block from primitives, and a backend
overrides the block if a fused implementation is faster. The composed form defines the result. Only the composed form
passes all intermediate values to the tap, a callback for debugging (see `observed.py`).

Shapes are written in the axis letters of `primitives.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np

from mlx_engine.backends.batch import Batch, KVView, Wanted
from mlx_engine.backends.experts import Experts, SharedExpert
from mlx_engine.backends.parameters import (
    Activation,
    Array,
    Convolution,
    DeltaNet,
    Gating,
    HeadNorms,
    Linear,
    Mamba2,
    Native,
    Norm,
    RMSNorm,
    Rope,
    Token,
)
from mlx_engine.backends.primitives import Primitives, block, dispatch, exchange, storage
from mlx_engine.backends.sampling import Draw, packed, unpacked
from mlx_engine.backends.session_guard import SessionGuard
from mlx_engine.kernels.cpu.products.order_numpy import sum_exp
from mlx_engine.observe.profiler import Profiler
from mlx_engine.quant.key_values import types_text
from mlx_engine.quant.weight import Weight


class Layers(Protocol):
    """The definition of a model's layers: a function that calls the operations of the backend `be`."""

    def __call__(self, be: Any, x: Array, batch: Any, *, want: Wanted) -> Array:
        """Return hidden states: (T, D) of all tokens if `want` is "every", else (R, D) of the wanted tokens."""


class Program(ABC):
    """All layers of a model, in the form in which a backend runs them. The model owns its program.

    Attributes:
        reason: why the backend could not compile the layers, and runs them op by op; None if they are compiled, or if
            the backend never compiles layers.
    """

    reason: str | None = None

    @abstractmethod
    def run(self, x: Array, batch: Batch) -> Array:
        """Run all layers on x (T, width). Return the hidden states (R, D) of the wanted tokens after the last layer.

        `width` is that of `Backend.compile`. The keys and values of all tokens are written to the batch's slots. If no
        logits are wanted, the returned array is undefined.
        """


class Ranks(Protocol):
    """The ranks (processes) that share a model. Methods take NumPy or MLX arrays, and return the same type.

    Attributes:
        rank: the number of this process.
        size: the number of ranks.
    """

    rank: int
    size: int

    def gather(self, array: Native) -> Native:
        """Return the arrays of all ranks, which must have the same shape, as one array (size, ...) in rank order."""

    def sum(self, array: Native) -> Native:
        """Return the sum of the arrays of all ranks, added in rank order."""


class Backend(Primitives):
    """Operations on one array type. Results are float32 unless a docstring, or `activations`, says otherwise."""

    name: str
    device: str = "cpu"
    # Whether operations only build a graph, which is evaluated when a result is needed, as in MLX.
    lazy: bool = False
    # The type of activations: one of `backends.ACTIVATIONS`. With "f16" or "bf16" (only on backends that use MLX),
    # results have this type where docstrings say float32; logits stay float32. With "i16", arrays are float32, and only
    # the inputs of matrix products are rounded.
    activations: str = "f32"
    # The type of keys and values in the cache: one of `backends.KV_TYPES`. Set before a model is built.
    kv_type: str = "f32"
    # Whether the bits of a row are independent of the other rows of the pass; docs/exactness.md lists the exceptions.
    fixes_bits: bool = False
    # The profiler; None except on the copies of a backend that `observed.profiled` makes.
    profiler: Profiler | None = None

    def __init__(self) -> None:
        self.guard = SessionGuard(self.name)

    @property
    def description(self) -> str:
        """Name, device and types that are not the default: "parallel (cpu), activations i16, keys and values q8_0"."""
        return f"{self.name} ({self.device}){types_text(self.activations, self.kv_type)}"

    # ---- weights, arrays and token ids ----

    @abstractmethod
    def prepare(self, weight: Weight) -> Array:
        """Convert a matrix (N, K), or a vector such as a norm weight or a bias, to this backend's own form."""

    def stack(self, linears: Sequence[Linear]) -> Native:
        """Convert the linear layers of X experts, all of the same shape, to the form that `expert_linear` reads."""
        return tuple(linears)

    # Whether the backend implements `stack_some`.
    holds_some_experts = False

    def stack_some(self, read: Callable[[int], Linear], n: int, n_slots: int) -> Native:
        """Return the linear layers of n experts, of which at most `n_slots` are in memory at a time.

        The result has the form that `expert_linear` reads. `read(e)` prepares the layer of expert e. The MLX backends
        call `read` when a chosen expert is not in memory. The compiled CPU backend calls `read` for all experts
        immediately, because its layers are views of the file.
        """
        raise NotImplementedError

    def embeds_stored(self, table: Weight) -> bool:
        """Return True if `embed` takes this `Weight`; return False if `embed` takes the result of `prepare`."""
        return False

    def discard(self, linear: Linear) -> None:
        """Free the backend's data of a linear layer that no model uses any more."""

    def read_ahead(self) -> None:
        """Start reading mapped weights into memory. Called once, after a model has been built."""

    def warm_up(self, run: Callable[[], Array]) -> None:
        """Compile and tune the kernels. Called once, after `read_ahead`. `run` runs a pass of one token."""

    @abstractmethod
    def array(self, values: np.ndarray) -> Array:
        """Return a NumPy array as this backend's float32 array."""

    def as_activations(self, values: np.ndarray) -> Array:
        """Convert activations, such as hidden states, from NumPy to this backend's array, of the type `activations`."""
        return self.array(values)

    @abstractmethod
    def host(self, x: Array) -> np.ndarray:
        """Return this backend's array as a float32 NumPy array of the same shape."""

    def sum_exp(self, row: np.ndarray, top: float) -> float:
        """Return `sum(exp(row - top))` of a row of logits (V,) on the host; `top` is the largest logit.

        Every backend's implementation gives the same bits: `kernels/cpu/products/order_numpy.py` defines the order of
        the sum.
        """
        return sum_exp(row, top)

    def row_sums(self, logits: Array) -> Array:
        """Return sums (R,) for `bad_rows`: for each row of logits (R, V), the sum of the logits or of their squares.

        A lazy backend does not wait for the values. If a logit is NaN or infinite, the sum is NaN or infinite. A sum of
        finite logits may overflow. The order of summation is not fixed.
        """
        # Summing the squares of 151,936 logits takes 11 us (BLAS), summing the logits 22 us (NumPy).
        with np.errstate(over="ignore", invalid="ignore"):
            return cast(Array, np.array([row.dot(row) for row in self.host(logits)]))

    def bad_rows(self, logits: Array, sums: Array) -> dict[int, np.ndarray]:
        """Wait for `sums = row_sums(logits)`. Return the rows with NaN or infinities: row index -> logits (V,)."""
        totals = self.host(sums).tolist()
        if all(map(math.isfinite, totals)):
            return {}
        rows = {r: self.host(logits)[r] for r, total in enumerate(totals) if not math.isfinite(total)}
        # The sum of a row of finite logits may have overflowed: check the row itself.
        return {r: row for r, row in rows.items() if not np.isfinite(row).all()}

    def token_id(self, token: Token) -> int:
        """Return the id of a chosen token as an int. A lazy backend waits for the device here."""
        return int(cast(int, token))  # a lazy backend overrides this

    def begin(self, x: Array | Token | Sequence[Array | Token]) -> None:
        """Start to compute x, one or several arrays, without waiting for the result. Does nothing unless `lazy`."""

    def wait(self, x: Array | Token | Sequence[Array | Token]) -> None:
        """Wait until x, one or several arrays, has been computed. Does nothing unless `lazy`."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Return a context manager for forward passes. Entering it may change settings of the process (BLAS, streams).

        Raises:
            ClosedError: the backend has been closed.
            BackendUnavailableError: this process was forked, and the backend does not work in forked processes.
        """
        self.guard.check()
        yield

    def close(self) -> None:
        """Wait until no other thread has a session, then end the backend's threads. All later sessions are refused."""
        with self.guard.close():
            pass

    @dispatch
    def choose(self, logits: Array, draws: Sequence[Draw]) -> list[Token]:
        """Choose a token for each row of logits (R, V), by argmax or by sampling; `draws[r]` has the options of row r.

        Return R token ids; a lazy backend returns them as arrays.
        """
        rows = [logits if len(draws) == 1 else self.take(logits, (r,)) for r in range(len(draws))]
        return [
            self.argmax(row) if draw.mask is None and draw.sampling.is_argmax else self.sample(row, draw)
            for row, draw in zip(rows, draws, strict=True)
        ]

    # ---- KV stores: the cache (`mlx_engine/cache`) assigns their slots; the backend chooses their memory layout ----

    @abstractmethod
    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int, n_arrays: int = 2) -> Array:
        """Return a KV store of `n_slots` uninitialised slots of the type `kv_type`.

        A slot holds the keys (G, E) and the values (G, E) of one token. With `n_arrays` 1, it holds only keys, which
        attention also reads as values.
        """

    @storage
    @abstractmethod
    def kv_write(self, store: Array, slots: np.ndarray, k: Array, v: Array) -> Array:
        """Write keys and values (T, G, E) to slots (T,) int64, and return the store, which may be changed in place.

        If the store has one array, only the keys are written.
        """

    @abstractmethod
    def kv_copy(self, store: Array, source: int, target: int, n: int) -> Array:
        """Copy slots [source, source + n) to slots [target, target + n), bit for bit; the ranges do not overlap.

        Return the store, which may be changed in place. May be called outside of sessions.
        """

    @abstractmethod
    def kv_read(self, store: Array, first: int, n: int) -> np.ndarray:
        """Return the stored elements of slots [first, first + n): a view of the store, or a copy.

        The shape is (n_arrays, G, n, length of a row): `n_arrays` is that of `kv_empty`, and `quant/key_values.py`
        defines the elements and the length of a row. May be called outside of sessions. If the backend is not lazy,
        another thread may call this while passes write to other slots.
        """

    @abstractmethod
    def kv_restore(self, store: Array, first: int, values: np.ndarray) -> Array:
        """Write `values`, a result of `kv_read`, to the slots from `first` on. May be called outside of sessions.

        Return the store, which may be changed in place.
        """

    @abstractmethod
    def kv_nbytes(self, store: Array) -> int:
        """Return the size of a KV store in bytes."""

    def kv_append(self, batch: Batch, layer: int, k: Array, v: Array) -> KVView:
        """Write the new tokens' keys and values (T, G, E) to a layer's store. Return the KV view for `attention`."""
        group, layers = batch.group(layer), batch.stores.layers
        store = self.kv_write(layers[layer], group.slots, k, v)
        if batch.stores.are_kept:
            layers[layer] = store
        return KVView(store, batch.stores.page, group.spans, group.window)

    # ---- recurrent states: the cache assigns slots to sequences, see `cache/states.py` ----

    @abstractmethod
    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Array:
        """Return a store of `n_slots` arrays of this shape, filled with zeros."""

    @abstractmethod
    def state_read(self, store: Array, slot: int) -> np.ndarray:
        """Return the float32 array of a slot: a view of the store, or a copy.

        May be called outside of sessions and, unless the backend is lazy, by another thread while passes run.
        """

    @abstractmethod
    def state_restore(self, store: Array, slot: int, values: np.ndarray) -> None:
        """Write `values`, a result of `state_read`, to a slot. May be called outside of sessions."""

    @abstractmethod
    def state_nbytes(self, store: Array) -> int:
        """Return the size of a store of states in bytes."""

    # ---- exchanges between ranks: every rank calls them in the same order, with arrays of the same shape ----
    # (except for `all_columns` and `all_best`, where the last ranks may have fewer columns)

    # The ranks that share the tensors of the model; None if this process has whole tensors.
    group: Ranks | None = None

    @exchange
    def all_sum(self, x: Array) -> Array:
        """Return the sum (T, N) of x over the ranks of `group`, added in rank order; x itself if `group` is None."""
        return x if self.group is None else self.array(self.group.sum(self.host(x)))

    @exchange
    def all_columns(self, x: Array, n: int) -> Array:
        """Return (T, n): the columns of every rank's x, in rank order. The last ranks may have fewer columns."""
        if self.group is None:
            return x
        here, size = self.host(x), self.group.size
        padded = np.zeros((len(here), -(-n // size)), dtype=np.float32)
        padded[:, : here.shape[1]] = here
        return self.array(np.ascontiguousarray(np.concatenate(self.group.gather(padded), axis=1)[:, :n]))

    @exchange
    def all_best(self, x: Array, n: int, k: int) -> Array:
        """Return logits (R, n) of all ranks like `all_columns`, but only the k largest logits of each row are correct.

        To send fewer bytes, every rank sends only its k largest logits of each row. All logits of the row that no rank
        has sent are set to one value, at least 1 below the smallest sent logit. If a logit of a row is NaN or infinite
        on any rank, the whole row is NaN.
        """
        if self.group is None:
            return x
        return self.array(unpacked(self.group.gather(packed(self.host(x), k)), n))

    # ---- blocks ----

    # The tap: a function that is called with the name and the array of each intermediate value. Set only on the copies
    # of a backend that `observed.py` makes.
    tap: Callable[[str, Array], None] | None = None

    @dispatch
    def norm(self, x: Array, norm: Norm | None) -> Array:
        """Return x after `norm`, which is an RMS norm or a layer norm; return x itself if `norm` is None."""
        if norm is None:
            return x
        if isinstance(norm, RMSNorm):
            return self.note(norm.name, self.rms_norm(x, norm.weight, norm.eps))
        return self.note(norm.name, self.layer_norm(x, norm.weight, norm.bias, norm.eps))

    @block
    def norm_project(self, x: Array, norm: Norm | None, projections: Sequence[Linear]) -> list[Array]:
        """Return the products of the normed x with several matrices, for example those of queries, keys and values."""
        h = self.norm(x, norm)
        return [self.note(p.name, self.linear(h, p)) for p in projections]

    @block
    def project_norm(self, x: Array, projection: Linear, norm: Norm) -> Array:
        """Return `norm(projection(x))`, for models that norm queries or keys before they are split into heads."""
        return self.norm(self.note(projection.name, self.linear(x, projection)), norm)

    @block
    def head_norm_rope(
        self, q: Array, k: Array, v: Array, head_dim: int, norms: HeadNorms, rope: Rope, positions: Sequence[int]
    ) -> tuple[Array, Array, Array]:
        """Split q (T, H*E), k (T, G*E) and v (T, G*E) into heads, and norm and rotate the heads of q and k.

        `norms` is a pair of the norms of query heads and of key heads, or None. Queries are rotated by `rope`, keys by
        `rope.keys`.
        """
        q, k, v = self.heads(q, head_dim), self.heads(k, head_dim), self.heads(v, head_dim)
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        return self.rope(q, rope, positions), self.rope(k, rope.keys, positions), v

    @block
    def norm_rope(
        self, x: Array, head_dim: int, norm: RMSNorm | None, rope: Rope | None, positions: Sequence[int]
    ) -> Array:
        """Split x (T, N) into heads, and norm and rotate the heads. If `norm` or `rope` is None, skip its step."""
        x = self.norm(self.heads(x, head_dim), norm)
        return x if rope is None else self.rope(x, rope, positions)

    @block
    def project_add(self, x: Array, projection: Linear, residual: Array) -> Array:
        """Return `residual + projection(x)`: the last step of attention and of the FFN."""
        return self.add(residual, self.note(projection.name, self.linear(x, projection)))

    @block
    def project_norm_add(self, x: Array, projection: Linear, norm: Norm, residual: Array) -> Array:
        """Return `residual + norm(projection(x))`: `project_add` for models with a norm after the projection."""
        return self.add(residual, self.norm(self.note(projection.name, self.linear(x, projection)), norm))

    @block
    def norm_gate_up(self, x: Array, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Array:
        """Return `activation(gate(h)) * up(h)`, (T, F), where h is the normed x: the first half of a gated FFN."""
        h = self.norm(x, norm)
        gated = self.activate(self.note(gate.name, self.linear(h, gate)), activation)
        return self.multiply(gated, self.note(up.name, self.linear(h, up)))

    @block
    def norm_up(self, x: Array, norm: Norm | None, up: Linear, activation: Activation) -> Array:
        """Return `activation(up(h))`, (T, F), where h is the normed x: the first half of an FFN without a gate."""
        return self.activate(self.note(up.name, self.linear(self.norm(x, norm), up)), activation)

    @block
    def norm_experts(self, x: Array, norm: Norm, experts: Experts) -> Array:
        """Return, for each token, the sum of `weight * expert(h)` over its chosen experts, where h is the normed x.

        With `routing.weighs_inputs`, a token has one chosen expert, and its result is `expert(weight * h)`. If
        `experts.shared` is given, its output is added. If `experts.router_norm` is given, the router reads x after this
        norm instead of h. `experts.post_norm` is not applied.
        """
        h, gate, up, down = self.norm(x, norm), experts.gate, experts.up, experts.down
        routed = h if experts.router_norm is None else self.norm(x, experts.router_norm)
        logits = self.note(experts.router.name, self.linear(routed, experts.router))
        ids, weights = self.route(logits, experts.routing)
        of_experts = self.combine(h, weights) if experts.routing.weighs_inputs else h
        gates = None if gate is None else self.note(gate.name, self.expert_linear(of_experts, gate, ids))
        inner = self.note(up.name, self.expert_linear(of_experts, up, ids))
        if gates is not None:
            inner = self.gated(gates, inner, experts.activation)
        elif experts.activation != "clamped_swiglu":
            inner = self.activate(inner, experts.activation)
        y = self.note(down.name, self.expert_linear(inner, down, ids))
        y = self.note(experts.name, y if experts.routing.weighs_inputs else self.combine(y, weights))
        return y if experts.shared is None else self.add(y, self.shared_expert(h, experts.shared))

    @block
    def norm_experts_add(self, x: Array, norm: Norm, experts: Experts, residual: Array | None = None) -> Array:
        """Return `residual + experts.post_norm(norm_experts(x))`; the default residual is x."""
        y = self.norm_experts(x, norm, experts)
        return self.norm_add(y, experts.post_norm, x if residual is None else residual)

    @block
    def norm_add(self, x: Array, norm: Norm | None, residual: Array) -> Array:
        """Return `residual + norm(x)`; `residual + x` if `norm` is None."""
        return self.add(residual, self.norm(x, norm))

    @block
    def shared_expert(self, h: Array, expert: SharedExpert) -> Array:
        """Return `sigmoid(weight(h)) * down(activation(gate(h)) * up(h))`, (T, D).

        If `expert.weight` is None, the factor `sigmoid(weight(h))` is left out. If `expert.gate` is None, the argument
        of `down` is `activation(up(h))`.
        """
        if expert.gate is None:
            inner = self.norm_up(h, None, expert.up, expert.activation)
        else:
            inner = self.norm_gate_up(h, None, expert.gate, expert.up, expert.activation)
        y = self.note(expert.down.name, self.linear(inner, expert.down))
        return y if expert.weight is None else self.combine(y, self.sigmoid(self.linear(h, expert.weight)))

    @block
    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        """Return `x * sigmoid(gate)`, (T, N)."""
        return self.multiply(x, self.sigmoid(gate))

    @block
    def short_conv(self, batch: Batch, layer: int, b: Array, c: Array, x: Array, conv: Convolution) -> Array:
        """Write the layer's state, and return `c * convolution(b * x)`, (T, C). Here C is the number of channels."""
        return self.multiply(c, self.convolve(self.multiply(b, x), conv, batch.state(layer, 0)))

    @block
    def delta_net(
        self, batch: Batch, layer: int, x: Array, gate: Array, beta: Array, step: Array, net: DeltaNet
    ) -> Array:
        """Apply to x the convolution, the delta rule, the norm and the gate, and write the layer's states.

        Return (T, H*P). Here H is the number of value heads, and P their head dim.
        """
        mixed = self.silu(self.convolve(x, net.conv, batch.state(layer, 0)))
        y = self.delta_rule(mixed, beta, step, net.rule, batch.state(layer, 1))
        return self.multiply(self.merge(self.norm(y, net.norm)), self.silu(gate))

    @block
    def mamba2(self, batch: Batch, layer: int, gate: Array, x: Array, step: Array, net: Mamba2) -> Array:
        """Apply to x the convolution, the state space, the gate and the norm (if any), and write the layer's states.

        Return (T, H*P). Here H is the number of heads of the state space, and P their head dim.
        """
        mixed = self.silu(self.convolve(x, net.conv, batch.state(layer, 0)))
        y = self.merge(self.state_space(mixed, step, net.space, batch.state(layer, 1)))
        y = self.multiply(y, self.silu(gate))
        if net.norm is None:
            return y
        return self.note(net.norm.name, self.group_norm(y, net.norm.weight, net.norm.eps, net.norm_groups))

    @block
    def norm_head(self, x: Array, norm: Norm, head: Linear) -> Array:
        """Return the logits (R, V) of the wanted tokens from their hidden states (R, D): norm, then head."""
        return self.linear(self.norm(x, norm), head)

    def compile(self, layers: Layers, width: int) -> Program:
        """Return the program that runs a model's layers. Called for a new model, and after each change of its layers.

        The default program runs the definition op by op. A backend may instead run the definition once with a recorder
        in place of the backend, and return a faster program made of the recorded steps. `width` is the width of the
        layers' input: D, plus the widths of Gemma 4's per-layer inputs and of the masks of adapters.
        """
        return OpByOp(self, layers)

    @dispatch
    def activate(self, x: Array, activation: Activation) -> Array:
        """Return x after the named activation function."""
        functions: dict[Activation, Callable[[Array], Array]] = {
            "silu": self.silu, "gelu": self.gelu, "gelu_erf": self.gelu_erf, "relu2": self.relu2,
        }  # fmt: skip
        return functions[activation](x)

    @dispatch
    def gated(self, gate: Array, up: Array, gating: Gating) -> Array:
        """Return `clamped_swiglu(gate, up)` if `gating` is "clamped_swiglu", else `activate(gate, gating) * up`."""
        if gating == "clamped_swiglu":
            return self.clamped_swiglu(gate, up)
        return self.multiply(self.activate(gate, gating), up)

    def note(self, name: str, x: Array) -> Array:
        """Pass x to the tap, if one is set, and return x."""
        if self.tap is not None:
            self.tap(name, x)
        return x


class OpByOp(Program):
    """The default program: calls the definition of the layers in each pass."""

    def __init__(self, backend: Backend, layers: Layers, reason: str | None = None) -> None:
        self._backend, self._layers = backend, layers
        self.reason = reason

    def run(self, x: Array, batch: Batch) -> Array:
        """Run the definition on the backend."""
        return self._layers(self._backend, x, batch, want=batch.want)
