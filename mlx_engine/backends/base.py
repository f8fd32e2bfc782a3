"""The seam: the words that models are written in, and what each backend must be able to say.

Axis letters, here and everywhere: T tokens in the pass, R wanted rows of it, B sequences, S cached tokens, D hidden
size, F FFN size, H query heads, G KV heads, E head dim, V vocabulary, N outputs and K inputs of a linear layer.

Two layers. *Primitives* are abstract: an incomplete backend cannot even be made. *Blocks* are what models call;
this class composes them from primitives, and a backend overrides a block where fusing pays. The composed form
stays the definition, and the only one in which every intermediate value can be tapped (see `taps.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mlx_engine.backends.batch import Batch, KVView
from mlx_engine.backends.parameters import Activation, Array, Linear, Norm, RMSNorm, Rope, Token
from mlx_engine.backends.program import Layers, OpByOp, Program
from mlx_engine.backends.sampling import Draw, Sampling
from mlx_engine.observe.profiler import Profiler
from mlx_engine.quant.weight import Weight

Method = TypeVar("Method", bound=Callable[..., Any])

# What the decorators below have registered: names by kind, in the order of this file. Taps, profiler and contract suite
# take their lists from here.
OPERATIONS: dict[str, list[str]] = {"primitive": [], "storage": [], "block": [], "dispatch": []}


def _registering(kind: str) -> Callable[[Method], Method]:
    def register(method: Method) -> Method:
        OPERATIONS[kind].append(method.__name__)
        return method

    return register


# Decorators, one for each kind. Every backend implements primitives, and storage of keys and values. Blocks are
# composed of primitives here, and a backend may fuse them. What dispatches only calls the operation that its parameters
# ask for.
primitive, storage, block, dispatch = map(_registering, OPERATIONS)


class Backend(ABC):
    """Pure functions on one array type; no model state. All results are float32 unless said otherwise."""

    name: str
    device: str = "cpu"
    # Whether results are promises that are kept only when they are asked for.
    lazy: bool = False
    # Set on the twin that `profiled.py` makes, and None on every other backend.
    profiler: Profiler | None = None

    # ---- crossing the seam ----

    @abstractmethod
    def prepare(self, weight: Weight) -> Array:
        """What this backend computes with: a gain or bias of one axis, or an (N, K) matrix as it multiplies it."""

    def embeds_stored(self, table: Weight) -> bool:
        """Whether `embed` takes this table as the file has it; else it takes what `prepare` makes of it."""
        return False

    def read_ahead(self) -> None:  # noqa: B027 - most backends hold their weights in memory
        """Called once, when a model has been built: weights that lie in a mapped file may be brought into memory."""

    def warm_up(self, run: Callable[[], Array]) -> None:  # noqa: B027 - most backends are ready when they are made
        """Called once, behind `read_ahead`; `run` is a pass of one token, for what is compiled or measured at first."""

    @abstractmethod
    def array(self, values: np.ndarray) -> Array:
        """A NumPy array as this backend's array, float32."""

    @abstractmethod
    def host(self, x: Array) -> np.ndarray:
        """This backend's array as a float32 NumPy array of the same shape."""

    def token_id(self, token: Token) -> int:
        """The id that `argmax` or `sample` chose, on the host. A lazy backend waits for the device here."""
        return int(token)

    def begin(self, x: Array) -> None:  # noqa: B027 - most backends are eager
        """Begin to compute x and return at once. Only a lazy backend has to do anything for that."""

    def wait(self, x: Array) -> None:  # noqa: B027 - most backends are eager
        """Return when x, an array or several, has been computed. Only a lazy backend has to do anything for that."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Held around every run of the model: a backend sets up there what must not leak to the rest."""
        yield

    # ---- primitives ----

    @primitive
    @abstractmethod
    def embed(self, table: Array, ids: Sequence[Token]) -> Array:
        """(T, D): the rows `ids` of a prepared (V, D) table."""

    @primitive
    @abstractmethod
    def linear(self, x: Array, linear: Linear) -> Array:
        """(T, N) from (T, K): `x @ weight.T + bias`, accumulated in float32 or better."""

    @primitive
    @abstractmethod
    def rms_norm(self, x: Array, gain: Array, eps: float) -> Array:
        """`gain * x / sqrt(mean(x**2) + eps)` over the last axis; x may be (T, D) or (T, H, E)."""

    @primitive
    @abstractmethod
    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float) -> Array:
        """`gain * (x - mean) / sqrt(var + eps) + bias` over the last axis of (T, D)."""

    @primitive
    @abstractmethod
    def rope(self, x: Array, rope: Rope, positions: Sequence[int]) -> Array:
        """Rotate (T, H, E): row t stands at `positions[t]`; pairs are (j, j + E/2)."""

    @primitive
    @abstractmethod
    def attention(self, q: Array, kv: KVView, counts: Sequence[int], scale: float) -> Array:
        """(R, H, E) softmax attention, in each sequence of its own; query head h reads KV head `h // (H // G)`.

        The queries are the last `counts[b]` tokens of each sequence b, end to end. A token sees the tokens up to
        itself, or within the view's window the last of them.
        """

    @primitive
    @abstractmethod
    def silu(self, x: Array) -> Array:
        """`x / (1 + exp(-x))`, without overflow for any x."""

    @primitive
    @abstractmethod
    def gelu(self, x: Array) -> Array:
        """The tanh form: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))`."""

    @primitive
    @abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """Elementwise sum of two arrays of one shape."""

    @primitive
    @abstractmethod
    def multiply(self, a: Array, b: Array) -> Array:
        """Elementwise product of two arrays of one shape."""

    @primitive
    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """(T, D): every element times one number."""

    @primitive
    @abstractmethod
    def heads(self, x: Array, head_dim: int) -> Array:
        """(T, H, E) from (T, H*E)."""

    @primitive
    @abstractmethod
    def merge(self, x: Array) -> Array:
        """(T, H*E) from (T, H, E)."""

    @primitive
    @abstractmethod
    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """(R, ...): the rows of (T, ...) with these numbers."""

    @primitive
    @abstractmethod
    def argmax(self, logits: Array) -> Token:
        """The id of the largest of (1, V) logits; of equal ones the lowest id."""

    @primitive
    @abstractmethod
    def sample(self, logits: Array, sampling: Sampling, recent: Sequence[Token], u: float) -> Token:
        """The id that the draw `u` in [0, 1) selects from (1, V) logits, as `sampling.py` defines it."""

    @dispatch
    def choose(self, logits: Array, draws: Sequence[Draw]) -> list[Token]:
        """Return R ids, one for each row of (R, V) logits, chosen as the row's own draw says."""
        rows = [logits if len(draws) == 1 else self.take(logits, (r,)) for r in range(len(draws))]
        return [
            self.argmax(row) if draw.sampling.is_argmax else self.sample(row, draw.sampling, draw.recent, draw.u)
            for row, draw in zip(rows, draws, strict=True)
        ]

    # ---- keys and values: the cache decides which slots are whose, the backend how a store lies in memory ----

    @abstractmethod
    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int) -> Array:
        """A store of `n_slots` slots for keys and values (G, E) each; what lies in the slots is undefined."""

    @storage
    @abstractmethod
    def kv_write(self, store: Array, slots: np.ndarray, k: Array, v: Array) -> Array:
        """The store with (T, G, E) keys and values in these slots, (T,) int64; it may be the same object, changed."""

    @abstractmethod
    def kv_nbytes(self, store: Array) -> int:
        """Bytes that the store occupies."""

    def kv_append(self, batch: Batch, layer: int, k: Array, v: Array) -> KVView:
        """Write a layer's keys and values (T, G, E) of the new tokens; return what their queries attend to."""
        group, layers = batch.group(layer), batch.stores.layers
        store = self.kv_write(layers[layer], group.slots, k, v)
        if batch.stores.are_kept:
            layers[layer] = store
        return KVView(store, batch.stores.page, group.spans, group.window)

    # ---- blocks ----

    # Called with a name and an array where a value inside a block may be of interest; `taps.py` sets it.
    tap: Callable[[str, Array], None] | None = None

    @dispatch
    def norm(self, x: Array, norm: Norm) -> Array:
        """Whichever norm the parameters describe."""
        if isinstance(norm, RMSNorm):
            return self.note(norm.name, self.rms_norm(x, norm.gain, norm.eps))
        return self.note(norm.name, self.layer_norm(x, norm.gain, norm.bias, norm.eps))

    @block
    def norm_project(self, x: Array, norm: Norm, projections: Sequence[Linear]) -> list[Array]:
        """Several projections of one normed input: q, k, v."""
        h = self.norm(x, norm)
        return [self.note(p.name, self.linear(h, p)) for p in projections]

    @block
    def head_norm_rope(
        self,
        q: Array,
        k: Array,
        v: Array,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rope: Rope,
        positions: Sequence[int],
    ) -> tuple[Array, Array, Array]:
        """Split (T, H*E), (T, G*E), (T, G*E) into heads; norm (if `norms`) and rotate those of q and k."""
        q, k, v = self.heads(q, head_dim), self.heads(k, head_dim), self.heads(v, head_dim)
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        return self.rope(q, rope, positions), self.rope(k, rope, positions), v

    @block
    def project_add(self, x: Array, projection: Linear, residual: Array) -> Array:
        """`residual + projection(x)`: how attention and the feed-forward network end."""
        return self.add(residual, self.note(projection.name, self.linear(x, projection)))

    @block
    def project_norm_add(self, x: Array, projection: Linear, norm: Norm, residual: Array) -> Array:
        """`residual + norm(projection(x))`: how they end where what they add is normed."""
        return self.add(residual, self.norm(self.note(projection.name, self.linear(x, projection)), norm))

    @block
    def norm_gate_up(self, x: Array, norm: Norm, gate: Linear, up: Linear, activation: Activation) -> Array:
        """(T, F): `activation(gate(h)) * up(h)` of the normed h, the first half of a gated feed-forward network."""
        h = self.norm(x, norm)
        gated = self.activate(self.note(gate.name, self.linear(h, gate)), activation)
        return self.multiply(gated, self.note(up.name, self.linear(h, up)))

    @block
    def norm_up(self, x: Array, norm: Norm, up: Linear, activation: Activation) -> Array:
        """(T, F): `activation(up(h))` of the normed h, the first half of a feed-forward network without a gate."""
        return self.activate(self.note(up.name, self.linear(self.norm(x, norm), up)), activation)

    @block
    def norm_head(self, x: Array, norm: Norm, head: Linear) -> Array:
        """Logits (R, V) of the rows (R, D) that are wanted. The head is the largest matrix by far."""
        return self.linear(self.norm(x, norm), head)

    def compile(self, layers: Layers) -> Program:
        """Return the program that runs a model's layers, which `layers` defines.

        Called when a model has been built. A backend that records the definition may run something faster that gives
        the same; this one runs it operation by operation.
        """
        return OpByOp(self, layers)

    @dispatch
    def activate(self, x: Array, activation: Activation) -> Array:
        """The named activation."""
        return self.silu(x) if activation == "silu" else self.gelu(x)

    def note(self, name: str, x: Array) -> Array:
        """Show x to the tap, if there is one, and hand it on."""
        if self.tap is not None:
            self.tap(name, x)
        return x
