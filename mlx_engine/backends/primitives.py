"""The primitives: operations that every backend implements. `base.py` composes blocks from them.

Shapes are written in axis letters, which have these meanings unless a docstring gives another one:

    T  tokens in the forward pass          D  hidden size      V  vocabulary size
    R  tokens whose logits are wanted      F  FFN size         N  outputs of a linear layer
    B  sequences in the forward pass       H  query heads      K  inputs of a linear layer
    S  cached tokens of a sequence         G  KV heads         E  head dim
    X  experts of a layer                  C  experts that each token uses
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlx_engine.backends.batch import KVView, StateView
from mlx_engine.backends.experts import ExpertLinear, Routing
from mlx_engine.backends.parameters import Array, Convolution, DeltaRule, Linear, Rope, Scores, StateSpace, Token
from mlx_engine.backends.sampling import Draw
from mlx_engine.quant.weight import Weight

Method = TypeVar("Method", bound=Callable[..., Any])

# Maps each kind of operation to the names of its operations, in the order of this file and `base.py`. The
# primitives are the abstract methods of `Primitives`; the decorators below add the other operations.
OPERATIONS: dict[str, list[str]] = {"primitive": [], "storage": [], "block": [], "dispatch": [], "exchange": []}


def _registering(kind: str) -> Callable[[Method], Method]:
    def register(method: Method) -> Method:
        OPERATIONS[kind].append(method.__name__)
        return method

    return register


# Decorators for the other kinds. Every backend implements the storage operation, `kv_write`. Blocks are composed of
# primitives, and a backend may fuse them. A dispatch method chooses which operation to call: `norm`, for example, calls
# `rms_norm` or `layer_norm`. An exchange combines the arrays of several ranks (processes that share a model).
storage, block, dispatch, exchange = map(_registering, [kind for kind in OPERATIONS if kind != "primitive"])


class Primitives(ABC):
    """The abstract operations on arrays of one type, without model state.

    Where a docstring names no other type, results are float32; float64 in `scalar`; float16 or bfloat16 if activations
    have this type.
    """

    @abstractmethod
    def embed(self, table: Array | Weight, ids: Sequence[Token]) -> Array:
        """Return (T, D): the rows `ids` of a (V, D) embedding table."""

    @abstractmethod
    def linear(self, x: Array, linear: Linear) -> Array:
        """Return `x @ weight.T + bias`, (T, N) from (T, K), accumulated in float32 or float64."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Return `weight * x / sqrt(mean(x**2) + eps)` over the last axis of (T, D) or (T, H, E)."""

    @abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """Return `weight * (x - mean) / sqrt(var + eps) + bias` over the last axis of (T, D)."""

    @abstractmethod
    def group_norm(self, x: Array, weight: Array, eps: float, n_groups: int) -> Array:
        """Return (T, N), where each of `n_groups` groups of columns is RMS-normed separately; the weight is (N,)."""

    @abstractmethod
    def rope(self, x: Array, rope: Rope, positions: Sequence[int]) -> Array:
        """Apply rotary embedding to (T, H, E): rotate elements j and j + E/2 of row t for position `positions[t]`.

        The rotated pair is multiplied by `rope.lengths[j]` and `rope.growth.at(positions[t])`, if they are not None.
        """

    @abstractmethod
    def attention(self, q: Array, kv: KVView, counts: Sequence[int], scores: Scores) -> Array:
        """Return causal softmax attention (R, H, E) within each sequence; query head h reads KV head `h // (H // G)`.

        `q` has the queries (R, H, E) of the last `counts[b]` tokens of each sequence b, end to end. A token attends to
        itself and to all earlier tokens. With a window (`kv.window`), the first position to which a token attends is
        `first_visible` of `batch.py`.
        """

    @abstractmethod
    def convolve(self, x: Array, conv: Convolution, state: StateView) -> Array:
        """Return the causal convolution (T, C) within each sequence: row t is `sum_w weight[w] * x[t - W + 1 + w]`.

        C is the number of channels here, and W the width of the convolution. The bias, if any, is added. The state
        (W - 1, C) has the last W - 1 inputs. It is read before each run of consecutive rows, and written after the run:
        see `StateView`.
        """

    @abstractmethod
    def delta_rule(self, x: Array, beta: Array, step: Array, rule: DeltaRule, state: StateView) -> Array:
        """Return the output (T, H, P) of the gated delta rule, computed token by token within each sequence.

        Axis letters are those of `DeltaRule`. A row of x has queries (G, E), keys (G, E) and values (H, P); beta and
        step are (T, H). Each query and key is scaled to length 1: `q / sqrt(sum(q**2) + 1e-6)`. A value head
        uses q and k of its key head (`DeltaRule.key_head`). It updates its state M (E, P) by
        `M *= exp(rate * softplus(step + dt_bias))` and `M += outer(k, sigmoid(beta) * (v - k @ M))`. Then its output is
        `q @ M / sqrt(E)`. The state (H, E, P) is read before each run of consecutive rows, and written after the run:
        see `StateView`.
        """

    @abstractmethod
    def state_space(self, x: Array, step: Array, space: StateSpace, state: StateView) -> Array:
        """Return the output (T, H, P) of Mamba2's state space, computed token by token within each sequence.

        Axis letters are those of `StateSpace`. A row of x has inputs (H, P), B (G, N) and C (G, N); step is (T, H).
        With `dt = softplus(step + dt_bias)` and its input x (P,), a head updates its state M (N, P) to
        `exp(rate * dt) * M + outer(B, dt * x)`. Then its output is `C @ M + skip * x`. The state (H, N, P) is read
        before each run of consecutive rows, and written after the run: see `StateView`.
        """

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """Return `1 / (1 + exp(-x))`, without overflow for any x."""

    @abstractmethod
    def silu(self, x: Array) -> Array:
        """Return `x / (1 + exp(-x))`, without overflow for any x."""

    @abstractmethod
    def gelu(self, x: Array) -> Array:
        """Return the tanh form of GELU: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))`."""

    @abstractmethod
    def gelu_erf(self, x: Array) -> Array:
        """Return GELU with the error function: `0.5 x (1 + erf(x / sqrt(2)))`."""

    @abstractmethod
    def relu2(self, x: Array) -> Array:
        """Return `max(x, 0)**2`."""

    @abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """Return the elementwise sum of two arrays of one shape."""

    @abstractmethod
    def multiply(self, a: Array, b: Array) -> Array:
        """Return the elementwise product of two arrays of one shape."""

    @abstractmethod
    def clamped_swiglu(self, gate: Array, up: Array) -> Array:
        """Return `(u + 1) * g / (1 + exp(-1.702 * g))`, with `g = min(gate, 7)` and `u = clip(up, -7, 7)`."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """Return (T, D) with every element multiplied by a number."""

    @abstractmethod
    def soft_cap(self, x: Array, cap: float) -> Array:
        """Return (R, V) with every element x replaced by `cap * tanh(x / cap)`."""

    @abstractmethod
    def heads(self, x: Array, head_dim: int) -> Array:
        """Split (T, H*E) into heads, (T, H, E)."""

    @abstractmethod
    def merge(self, x: Array) -> Array:
        """Join heads (T, H, E) into (T, H*E)."""

    @abstractmethod
    def columns(self, x: Array, first: int, last: int) -> Array:
        """Return (T, last - first): the columns [first, last) of (T, N)."""

    @abstractmethod
    def concat(self, a: Array, b: Array) -> Array:
        """Return (T, M + N): the columns of `a`, (T, M), and after them the columns of `b`, (T, N)."""

    @abstractmethod
    def take(self, x: Array, rows: Sequence[int]) -> Array:
        """Return (R, ...): the rows of (T, ...) with these indices."""

    @abstractmethod
    def route(self, logits: Array, routing: Routing) -> tuple[Array, Array]:
        """Return the experts that each token chooses, (T, C) ids in ascending order, and their weights (T, C).

        `logits` is (T, X). `Routing` defines the choice, which depends only on the token's own row.
        """

    @abstractmethod
    def expert_linear(self, x: Array, linear: ExpertLinear, ids: Array) -> Array:
        """Return (T*C, N): for each token and each of its experts `ids` (T, C), the product with that expert's matrix.

        x is (T, K), with one row for all experts of a token, or (T*C, K), with a row for each expert of a token. If no
        token has chosen an expert, its matrix is not read.
        """

    @abstractmethod
    def head_linear(self, x: Array, linear: ExpertLinear) -> Array:
        """Return (T, H, N): for each head of x (T, H, E), its matrix (N, K) times the head's first K elements."""

    @abstractmethod
    def join_heads(self, a: Array, b: Array) -> Array:
        """Return (T, H, A + B): for each head, the elements of `a`, (T, H, A), then the elements of `b`, (T, H, B)."""

    @abstractmethod
    def combine(self, y: Array, weights: Array) -> Array:
        """Return (T, D): the sum over c, in ascending order, of `weights[t, c] * y[t*C + c]`, for y (T*C, D)."""

    @abstractmethod
    def argmax(self, logits: Array) -> Token:
        """Return the index of the largest of (1, V) logits; of several equal ones, the lowest index."""

    @abstractmethod
    def sample(self, logits: Array, draw: Draw) -> Token:
        """Return the id that `draw` selects from (1, V) logits, as `sampling.py` defines."""


OPERATIONS["primitive"] += [name for name in vars(Primitives) if name in Primitives.__abstractmethods__]
