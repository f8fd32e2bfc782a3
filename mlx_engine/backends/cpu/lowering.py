"""Lower a model's layers to the steps of a program for the compiled CPU kernels.

`lower` runs the definition of the layers once, with a `Lowering` object in place of the backend. The public methods of
`Lowering` have the names and arguments of `Backend`'s operations. They compute nothing: a method emits a step of
`kernels/cpu/program.py`, and returns the `Place` where the step's result will be. A method that only selects
columns or splits a value into heads emits no step. If the kernels lack an operation, CannotCompileError is raised, and
the backend runs the layers op by op. All intermediate values are in one scratch memory; `allocate` reuses the memory of
values that no later step reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mlx_engine.backends.base import Layers
from mlx_engine.backends.batch import Wanted
from mlx_engine.backends.cpu.descriptors import (
    KINDS,
    Block,
    ExpertBlock,
    address,
    convolution_fits,
    heads_fit,
    norm_descriptor,
    rule_fits,
    sinks_address,
    space_fits,
)
from mlx_engine.backends.experts import ExpertLinear, Experts
from mlx_engine.backends.parameters import (
    Activation,
    Array,
    Convolution,
    DeltaNet,
    Gating,
    Linear,
    Mamba2,
    Norm,
    RMSNorm,
    Rope,
    Scores,
)
from mlx_engine.backends.primitives import OPERATIONS
from mlx_engine.kernels.cpu.build import layout

if TYPE_CHECKING:
    from mlx_engine.backends.cpu.backend import CompiledBackend


@dataclass(eq=False)
class Buffer:
    """The part of the scratch memory that holds one value, with `width` floats per token.

    In a pass of n tokens, the part begins at float `n * at` of the scratch memory; `allocate` sets `at`.
    """

    width: int
    at: int = -1

    @property
    def end(self) -> int:
        """The smallest `at` of a buffer after this buffer: `at + width`, rounded up to a whole cache line."""
        return self.at + layout.whole_vectors(self.width)


@dataclass(frozen=True, eq=False)
class Place:
    """The location of a value: columns [column, column + width) of a buffer.

    A place stands for an array while layers are lowered, and has no elements. Comparing it or testing its truth raises
    TypeError: if a definition branches on the elements of an array, it cannot be lowered, because the steps of a
    program are the same in every pass.

    Attributes:
        is_wanted: whether the value has rows only for the wanted tokens (`Batch.rows`), not for all tokens of the pass.
        head_dim: the head dim if the value has been split into heads, else 0.
    """

    buffer: Buffer
    column: int
    width: int
    is_wanted: bool
    head_dim: int = 0

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise TypeError("the location of a value has no contents to compare")

    def __bool__(self) -> bool:
        raise TypeError("the location of a value is neither true nor false")

    @property
    def is_whole(self) -> bool:
        """Whether the value fills its buffer, so that its rows are contiguous."""
        return self.width == self.buffer.width


def allocate(steps: Sequence[dict[int, Any]], x: Buffer, y: Buffer) -> int:
    """Set the offset of each buffer, so that buffers in use at the same time do not overlap.

    Return the total size in floats per token. A step maps words (indices in the encoded step, see `layout.py`) to their
    values, some of which are buffers. Buffer x has the program's input, and is in use from the first step on. Buffer y
    has the program's result, and is in use until the last step has run.
    """
    last_step = {x: 0}
    for i, step in enumerate(steps):
        last_step |= {value: i for value in step.values() if isinstance(value, Buffer)}
    last_step[y] = len(steps)
    live: list[Buffer] = []

    def place(buffer: Buffer) -> None:
        buffer.at = 0
        for other in sorted(live, key=lambda other: other.at):
            if buffer.end <= other.at:
                break
            buffer.at = max(buffer.at, other.end)
        live.append(buffer)

    place(x)
    size = x.end
    for i, step in enumerate(steps):
        for word in (layout.OUT, layout.OUT_2):
            if word in step:
                place(step[word])
                size = max(size, step[word].end)
        live = [buffer for buffer in live if last_step[buffer] > i]
    return size


class View(NamedTuple):
    """The placeholder of a `KVView` while layers are lowered: the layer whose keys and values `attention` reads."""

    layer: int
    n_kv_heads: int


class PassBatch(NamedTuple):
    """The placeholder of a `Batch` while layers are lowered, with the attributes that a definition may use."""

    positions: object
    lengths: object
    wanted: object
    rows: object


class CannotCompileError(Exception):
    """A definition of layers needs an operation or a shape that the kernels lack, or reads the elements of an array.

    The message is a noun phrase that follows "because of".
    """


@dataclass
class Lowering:
    """Collects the steps of a program. `Lowered` describes the fields `ropes` to `parts`."""

    backend: CompiledBackend
    batch: PassBatch
    steps: list[dict[int, Any]] = field(default_factory=list)
    # `kv` maps each layer with keys and values to its item of `Lowered.kv`. `states` has the layers with a state.
    kv: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    ropes: dict[int, Rope] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    experts: list[ExpertBlock] = field(default_factory=list)
    inputs: int = 0
    parts: int = 0
    tap = None

    def __getattr__(self, op: str) -> Any:
        raise CannotCompileError(f"the operation {op}")

    def note(self, name: str, x: Place) -> Place:
        return x  # a compiled program has no taps

    def _place(self, x: object) -> Place:
        """Return x if it is a `Place`. Raise CannotCompileError if x is an array that the definition created."""
        if not isinstance(x, Place):
            raise CannotCompileError("an operation on an array that the definition of the layers has created")
        return x

    def _emit(self, op: int, is_wanted: bool, *inputs: Place | None, **fields: Any) -> None:
        """Add a step with up to four inputs, A to D in `layout.py`. An input is absent if it is None.

        `fields` maps names of words in `layout.py` to their values.
        """
        step: dict[int, Any] = {layout.OP: op, layout.WANTED: int(is_wanted)}
        step |= {getattr(layout, name): value for name, value in fields.items()}
        for first, place in zip_longest((layout.A_AT, layout.B_AT, layout.C_AT, layout.D_AT), inputs):
            step[first] = None
            if place is not None:
                step[first], step[first + 1], step[first + 2] = place.buffer, place.column, place.buffer.width
        self.steps.append(step)

    def _new(self, width: int, is_wanted: bool, head_dim: int = 0) -> Place:
        return Place(Buffer(width), 0, width, is_wanted, head_dim)

    def _whole(self, place: Place) -> Place:
        """Return a place that has the value in contiguous rows. Emit a step that copies the value if necessary."""
        return place if place.is_whole else self._copied(place, is_wanted=place.is_wanted)

    def _copied(self, place: Place, *, is_wanted: bool) -> Place:
        out = self._new(place.width, is_wanted, place.head_dim)
        from_all = int(is_wanted and not place.is_wanted)
        self._emit(layout.COPY, is_wanted, place, OUT=out.buffer, ROW_WIDTH=place.width, FROM_ALL=from_all)
        return out

    def _project(self, x: Place, block: Block, residual: Place | None = None) -> Place:
        source = self._whole(self._place(x))
        if source.width != block.n_inputs:
            raise CannotCompileError(f"a matrix of {block.n_inputs} columns with an input of {source.width} columns")
        out = self._new(block.n_outputs, source.is_wanted)
        added = self._residual(residual, out)
        self._emit(layout.PROJECT, source.is_wanted, source, added, OUT=out.buffer, STEP_BLOCK=block.address)
        self.inputs = max(self.inputs, layout.product_floats(block.n_inputs))
        self.kept.append(block)
        return out

    def _residual(self, x: Place | None, out: Place) -> Place | None:
        """Return a place that has residual x in contiguous rows; None if x is None.

        Raise CannotCompileError if x and `out`, the result of the step that adds x, have different shapes.
        """
        if x is None:
            return None
        added = self._whole(self._place(x))
        if (added.width, added.is_wanted) != (out.width, out.is_wanted):
            raise CannotCompileError("a residual of a different shape")
        return added

    # ---- operations, with the arguments of `Backend`'s ----

    def norm_project(self, x: Place, norm: Norm | None, projections: Any) -> list[Place]:
        block = self.backend.step_block(tuple(projections), norm)
        out = self._project(x, block)
        return [replace(out, column=c.start, width=c.stop - c.start) for c in block.columns]

    def linear(self, x: Place, linear: Linear) -> Place:
        return self._project(x, self.backend.step_block((linear,)))

    def project_add(self, x: Place, projection: Linear, residual: Place) -> Place:
        return self._project(x, self.backend.step_block((projection,)), residual)

    def project_norm(self, x: Place, projection: Linear, norm: Norm) -> Place:
        return self._project(x, self.backend.step_block((projection,), post=norm))

    def project_norm_add(self, x: Place, projection: Linear, norm: Norm, residual: Place) -> Place:
        return self._project(x, self.backend.step_block((projection,), post=norm), residual)

    def norm_gate_up(self, x: Place, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Place:
        return self._project(x, self.backend.step_block((gate, up), norm, activation))

    def norm_up(self, x: Place, norm: Norm | None, up: Linear, activation: Activation) -> Place:
        return self._project(x, self.backend.step_block((up,), norm, activation))

    def norm_experts(self, x: Place, norm: Norm, experts: Experts) -> Place:
        return self._mixture(x, self.backend.expert_block(norm, experts, False), None)

    def norm_experts_add(self, x: Place, norm: Norm, experts: Experts, residual: Place | None = None) -> Place:
        return self._mixture(x, self.backend.expert_block(norm, experts, True), residual)

    def _mixture(self, x: Place, block: ExpertBlock, residual: Place | None) -> Place:
        source = self._whole(self._place(x))
        out = self._new(block.width, source.is_wanted)
        added = self._residual(residual, out)
        self._emit(layout.EXPERTS, source.is_wanted, source, added, OUT=out.buffer, STEP_BLOCK=block.address)
        self.experts.append(block)
        return out

    def norm(self, x: Place, norm: Norm | None) -> Place:
        if self._place(x).head_dim:
            raise CannotCompileError("a norm of each head without a rotation")
        return self._place(x) if norm is None else self._norm_sum(x, norm, None)

    def norm_add(self, x: Place, norm: Norm | None, residual: Place) -> Place:
        return self._norm_sum(x, norm, residual)

    def _norm_sum(self, x: Place, norm: Norm | None, residual: Place | None) -> Place:
        source = self._whole(self._place(x))
        if norm is not None and norm.weight.size != source.width:
            raise CannotCompileError("a norm of another width than its input")
        out, descriptor = self._new(source.width, source.is_wanted), norm_descriptor(norm)
        fields = {"OUT": out.buffer, "ROW_WIDTH": source.width, "STEP_BLOCK": address(descriptor)}
        self._emit(layout.NORM_ADD, source.is_wanted, source, self._residual(residual, out), **fields)
        self.kept += [norm, descriptor]
        return out

    def all_sum(self, x: Place) -> Place:
        return self._exchange(layout.ALL_SUM, x, self._place(x).width)

    def all_columns(self, x: Place, n: int) -> Place:
        return self._exchange(layout.ALL_COLUMNS, x, n)

    def _exchange(self, op: int, x: Place, width: int) -> Place:
        """Emit an exchange between ranks, which Python runs between two calls of the program. Return its result."""
        source = self._whole(self._place(x))
        out = self._new(width, source.is_wanted, source.head_dim)
        self._emit(op, source.is_wanted, source, OUT=out.buffer, ROW_WIDTH=width)
        return out

    def heads(self, x: Place, head_dim: int) -> Place:
        return replace(self._place(x), head_dim=head_dim)

    def merge(self, x: Place) -> Place:
        return replace(self._place(x), head_dim=0)

    def head_linear(self, x: Place, linear: ExpertLinear) -> Place:
        source, n_heads, (n, k) = self._whole(self._place(x)), linear.n_experts, linear.shape
        if source.width != n_heads * source.head_dim or source.head_dim < k:
            raise CannotCompileError("matrices per head whose number or columns do not match the heads of their input")
        blocks = [self.backend.step_block((of,)) for of in linear.weights]
        table = np.array([block.address for block in blocks], dtype=np.int64)
        out = self._new(n_heads * n, source.is_wanted, n)
        self._emit(
            layout.HEAD_LINEAR, source.is_wanted, source, OUT=out.buffer, STEP_BLOCK=address(table), N_HEADS=n_heads,
            N_KV_HEADS=k, ROW_WIDTH=n,
        )  # fmt: skip
        self.inputs = max(self.inputs, layout.whole_vectors(k) + layout.product_floats(k) + layout.whole_vectors(n))
        self.kept += [blocks, table]
        return out

    def join_heads(self, a: Place, b: Place) -> Place:
        first, second = self._place(a), self._place(b)
        n, m = first.head_dim, second.head_dim
        n_heads = first.width // max(1, n)
        sizes = (n * n_heads, m * n_heads, first.is_wanted)
        if not n * m * n_heads or sizes != (first.width, second.width, second.is_wanted):
            raise CannotCompileError("heads of different numbers or rows")
        out = self._new(n_heads * (n + m), first.is_wanted, n + m)
        fields = {"OUT": out.buffer, "N_HEADS": n_heads, "N_KV_HEADS": m, "ROW_WIDTH": n}
        self._emit(layout.JOIN, first.is_wanted, first, second, **fields)
        return out

    def columns(self, x: Place, first: int, last: int) -> Place:
        place = self._place(x)
        if not 0 <= first < last <= place.width:
            raise CannotCompileError("columns that a value does not have")
        return replace(place, column=place.column + first, width=last - first)

    def multiply(self, a: Place, b: Place) -> Place:
        left, right = self._place(a), self._place(b)
        if (left.width, left.is_wanted) != (right.width, right.is_wanted):
            raise CannotCompileError("a product of different shapes")
        out = self._new(left.width, left.is_wanted)
        self._emit(layout.MULTIPLY, left.is_wanted, left, right, OUT=out.buffer, ROW_WIDTH=left.width)
        return out

    def scale(self, x: Place, factor: float) -> Place:
        source = self._place(x)
        out = self._new(source.width, source.is_wanted)
        fields = {"OUT": out.buffer, "ROW_WIDTH": source.width, "STEP_SCALE": _bits(factor)}
        self._emit(layout.SCALE, source.is_wanted, source, **fields)
        return out

    def take(self, x: Place, rows: object) -> Place:
        place = self._place(x)
        if rows is not self.batch.rows or place.is_wanted:
            raise CannotCompileError("rows other than the wanted rows")
        return self._copied(place, is_wanted=True)

    def head_norm_rope(
        self, q: Place, k: Place, v: Place, head_dim: int, norms: Any, rope: Rope, positions: object
    ) -> tuple[Place, ...]:
        a, b = self._place(q), self._place(k)
        if a.is_wanted or b.is_wanted or positions is not self.batch.positions:
            raise CannotCompileError("heads of the wanted tokens only, or other positions than the batch's")
        if a.width % head_dim or b.width % head_dim or any(norm.weight.size != head_dim for norm in norms or ()):
            raise CannotCompileError("a head dim that does not match the norms or projections")
        if rope.growth is None:
            rotated = self._rotated((a, b), head_dim, norms, rope)
        else:  # queries and keys are rotated by different tables
            of_q, of_k = (None, None) if norms is None else ((norm, norm) for norm in norms)
            rotated = [*self._rotated((a,), head_dim, of_q, rope), *self._rotated((b,), head_dim, of_k, rope.keys)]
        self.kept.append(norms)
        return (*rotated, replace(self._place(v), head_dim=head_dim))

    def norm_rope(self, x: Place, head_dim: int, norm: Norm | None, rope: Rope | None, positions: object) -> Place:
        place = self._place(x)
        if place.is_wanted or positions is not self.batch.positions:
            raise CannotCompileError("heads of the wanted tokens only, or other positions than the batch's")
        if place.width % head_dim or not (norm is None or (isinstance(norm, RMSNorm) and norm.weight.size == head_dim)):
            raise CannotCompileError("a head dim that does not match the norm or the projection")
        norms = None if norm is None else (norm, norm)
        self.kept.append(norms)
        return self._rotated((place,), head_dim, norms, Rope.none(head_dim) if rope is None else rope)[0]

    def _rotated(self, of: Sequence[Place], head_dim: int, norms: Any, rope: Rope) -> list[Place]:
        """Emit a step that applies norms and one cos/sin table to the heads of one or two values."""
        out = [self._new(place.width, False, head_dim) for place in of]
        n_heads, n_others = ([place.width // head_dim for place in of] + [0])[:2]
        outputs = {"OUT": out[0].buffer} if len(out) == 1 else {"OUT": out[0].buffer, "OUT_2": out[1].buffer}
        block = self.backend.head_block(n_heads, n_others, head_dim, norms)
        fields = {"STEP_BLOCK": block, "N_HEADS": n_heads, "N_KV_HEADS": n_others, "ROW_WIDTH": head_dim}
        self._emit(layout.HEADS, False, *of, **fields, **outputs)
        self.ropes[len(self.steps) - 1] = rope
        return out

    def kv_append(self, batch: object, layer: int, k: Place, v: Place) -> View:
        if batch is not self.batch:
            raise CannotCompileError("a batch other than the pass's own")
        a, b = self._place(k), self._place(v)
        if a.is_wanted or b.is_wanted or (a.width, a.head_dim) != (b.width, b.head_dim) or not a.head_dim:
            raise CannotCompileError("keys and values of the wanted tokens only, or not split into heads")
        n_heads = a.width // a.head_dim
        if layer in self.kv or a.width % a.head_dim:
            raise CannotCompileError("keys and values written twice in one layer, or a partial head")
        self.kv[layer] = (n_heads, a.head_dim, 1 if k is v else 2)
        self._emit(layout.KV_APPEND, False, a, b, LAYER=layer, N_KV_HEADS=n_heads, ROW_WIDTH=a.head_dim)
        return View(layer, n_heads)

    def attention(self, q: Place, kv: View, counts: object, scores: Scores) -> Place:
        if not isinstance(kv, View):
            raise CannotCompileError("attention over an object that is not a KV view")
        source, (layer, n_kv_heads) = self._whole(self._place(q)), kv
        if counts is not (self.batch.wanted if source.is_wanted else self.batch.lengths):
            raise CannotCompileError("counts that do not match the rows of the queries")
        head_dim = source.head_dim
        n_heads = source.width // max(1, head_dim)
        is_grouped = n_heads > 0 and n_kv_heads > 0 and n_heads % n_kv_heads == 0
        if not is_grouped or not heads_fit(n_heads // n_kv_heads, head_dim, self.backend.kv_type):
            raise CannotCompileError("a number of heads or a head dim that attention does not support")
        out = self._new(source.width, source.is_wanted, head_dim)
        self._emit(
            layout.ATTENTION, source.is_wanted, source, OUT=out.buffer, LAYER=layer, N_HEADS=n_heads,
            N_KV_HEADS=n_kv_heads, ROW_WIDTH=head_dim, STEP_SCALE=_bits(scores.scale),
            STEP_SOFTCAP=_bits(scores.softcap or 0.0), STEP_SINKS=sinks_address(scores, n_heads),
        )  # fmt: skip
        self.kept.append(scores)
        self.parts = max(self.parts, n_heads * (head_dim + layout.LANES))
        return out

    def sigmoid_gate(self, x: Place, gate: Place) -> Place:
        return self._gate(0, x, gate)

    def gated(self, gate: Place, up: Place, gating: Gating) -> Place:
        return self._gate(KINDS[gating], up, gate)

    def activate(self, x: Place, activation: Activation) -> Place:
        return self._gate(KINDS[activation], None, x)

    def _gate(self, kind: int, x: Place | None, gate: Place) -> Place:
        b, a = self._place(gate), None if x is None else self._place(x)
        is_alike = a is None or (a.width, a.is_wanted) == (b.width, b.is_wanted)
        if not is_alike or b.width % layout.LANES:
            raise CannotCompileError("a gate of another shape, or of a width that the kernel does not support")
        out = self._new(b.width, b.is_wanted)
        self._emit(layout.GATE, b.is_wanted, a, b, OUT=out.buffer, ROW_WIDTH=b.width, STEP_BLOCK=kind)
        return out

    def short_conv(self, batch: object, layer: int, b: Place, c: Place, x: Place, conv: Convolution) -> Place:
        self._begin_state(batch, layer, conv)
        return self._convolve(layer, x, conv, self.backend.convolution_descriptor(conv, False), (b, c))

    def delta_net(
        self, batch: object, layer: int, x: Place, gate: Place, beta: Place, step: Place, net: DeltaNet
    ) -> Place:
        self._begin_state(batch, layer, net.conv)
        if not rule_fits(net.rule):
            raise CannotCompileError("head dims of a delta rule that the kernel does not support")
        mixed = self._convolve(layer, x, net.conv, self.backend.convolution_descriptor(net.conv, True), ())
        inputs = (mixed, self._place(gate), self._place(beta), self._place(step))
        out = self._new(inputs[1].width, is_wanted=False)
        fields = {"OUT": out.buffer, "LAYER": layer, "STEP_BLOCK": self.backend.rule_descriptor(net)}
        self._emit(layout.DELTA, False, *inputs, **fields)
        self.kept.append(net)
        return out

    def mamba2(self, batch: object, layer: int, gate: Place, x: Place, step: Place, net: Mamba2) -> Place:
        self._begin_state(batch, layer, net.conv)
        if not space_fits(net):
            raise CannotCompileError("heads of a state space that the kernel does not support")
        mixed = self._convolve(layer, x, net.conv, self.backend.convolution_descriptor(net.conv, True), ())
        inputs = (mixed, self._place(gate), self._place(step))
        if any(place.is_wanted for place in inputs):
            raise CannotCompileError("a state space of the wanted tokens only")
        out = self._new(inputs[1].width, is_wanted=False)
        fields = {"OUT": out.buffer, "LAYER": layer, "STEP_BLOCK": self.backend.space_descriptor(net)}
        self._emit(layout.SPACE, False, *inputs, **fields)
        self.kept.append(net)
        return out

    def _begin_state(self, batch: object, layer: int, conv: Convolution) -> None:
        """Record that a layer has a state. Raise CannotCompileError for one of the reasons in the message below."""
        if batch is not self.batch or layer in self.states or not convolution_fits(conv):
            raise CannotCompileError(
                "a batch other than the pass's own, two states in one layer, or an unsupported number of channels"
            )
        self.states.add(layer)

    def _convolve(self, layer: int, x: Place, conv: Convolution, block: int, gates: tuple[Place, ...]) -> Place:
        places = [self._place(value) for value in (x, *gates)]
        if any(place.is_wanted or place.width != conv.weight.shape[1] for place in places):
            raise CannotCompileError("a convolution of the wanted tokens only, or of another width")
        out = self._new(places[0].width, is_wanted=False)
        self._emit(layout.CONVOLVE, False, *places, OUT=out.buffer, LAYER=layer, STEP_BLOCK=block)
        self.kept.append(conv)
        return out


def _bits(number: float) -> int:
    """Return the bits of a float64 number as an int64, the type of a step's words."""
    return int(np.float64(number).view(np.int64))


@dataclass
class Lowered:
    """The steps of a program, and the sizes of the memory that it needs.

    Attributes:
        steps: (steps, STEP_WIDTH) int64, the encoded steps.
        x: the buffer of the input, whose columns `Backend.compile` describes: first the hidden states.
        y: the location of the result.
        floats: number of scratch floats per token for all values.
        inputs: the most scratch floats per token that a matrix product needs, over all steps.
        experts: the mixtures of experts; `ExpertBlock.floats` returns the scratch floats that a mixture needs.
        parts: the most scratch floats that attention needs for the partial results of a query and a block of keys,
            over all steps.
        kv: for each layer, the number of KV heads, the head dim and the number of arrays of the KV store; None for a
            layer without keys and values. The list ends with the last layer that has keys and values or a state.
        ropes: maps the index of each step that rotates heads to the step's rotary embedding.
        kept: objects that must stay alive, because `steps` has only their addresses.
    """

    steps: np.ndarray
    x: Buffer
    y: Place
    floats: int
    inputs: int
    experts: list[ExpertBlock]
    parts: int
    kv: list[tuple[int, int, int] | None]
    ropes: dict[int, Rope]
    kept: list[object]


def lower(backend: CompiledBackend, layers: Layers, width: int, want: Wanted) -> Lowered:
    """Run the definition `layers` on a `Lowering`, and return the steps. `width` is the number of columns of the input.

    Raises:
        CannotCompileError: the kernels do not have an operation, or do not support its arguments.
    """
    batch = PassBatch(object(), object(), object(), object())
    lowering = Lowering(backend, batch)
    x = lowering._new(width, is_wanted=False)
    try:
        y = lowering._whole(lowering._place(layers(lowering, cast(Array, x), batch, want=want)))
    except (TypeError, AttributeError) as error:
        raise CannotCompileError(f"a definition that needs arrays: {error}") from error
    n_floats = allocate(lowering.steps, x.buffer, y.buffer)  # sets the offsets that `_encoded` reads
    return Lowered(
        steps=_encoded(lowering.steps),
        x=x.buffer,
        y=y,
        floats=n_floats,
        inputs=lowering.inputs,
        experts=lowering.experts,
        parts=lowering.parts,
        kv=[lowering.kv.get(layer) for layer in range(1 + max((*lowering.kv, *lowering.states), default=-1))],
        ropes=lowering.ropes,
        kept=lowering.kept,
    )


# The names of the backend operations that `Lowering` implements.
LOWERED = [name for names in OPERATIONS.values() for name in names if name in vars(Lowering)]


def _encoded(steps: Sequence[dict[int, Any]]) -> np.ndarray:
    encoded = np.zeros((len(steps), layout.STEP_WIDTH), dtype=np.int64)
    for row, step in zip(encoded, steps, strict=True):
        for word, value in step.items():
            row[word] = -1 if value is None else value.at if isinstance(value, Buffer) else value
    return encoded
