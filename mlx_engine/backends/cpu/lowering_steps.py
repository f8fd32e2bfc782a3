"""The steps of a program: a method for each operation that the compiled CPU kernels have; see `lowering.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_engine.backends.cpu.buffers import Buffer, Place
from mlx_engine.backends.cpu.experts import ExpertBlock
from mlx_engine.backends.cpu.host_memory import address
from mlx_engine.backends.cpu.kernel_limits import convolution_fits, rule_fits
from mlx_engine.backends.cpu.matrices import Block, norm_words, sinks_address
from mlx_engine.backends.experts import Experts
from mlx_engine.backends.mixers import Convolution, DeltaNet
from mlx_engine.backends.parameters import Activation, HeadNorms, Linear, Norm, RMSNorm, Rope, Scores
from mlx_engine.backends.recording import BatchValue, CannotCompileError, Value
from mlx_engine.kernels.cpu.build import layout


@dataclass
class Builders:
    """The backend's functions for making kernel parameters: blocks of matrices, heads, convolutions, delta rules."""

    block: Callable[[tuple[Linear, ...], Norm | None, Activation | None, Norm | None], Block]
    heads: Callable[[int, int, int, HeadNorms], int]
    attends: Callable[[int, int], bool]
    experts: Callable[[Norm, Experts, bool], ExpertBlock]
    convolution: Callable[[Convolution, bool], int]
    rule: Callable[[DeltaNet], int]


@dataclass
class Lowering:
    """The steps so far, and where each value lies. Methods with the names of `Backend`'s operations add their steps."""

    builders: Builders
    batch: BatchValue
    places: dict[Value, Place] = field(default_factory=dict)
    # KV view -> (layer, number of KV heads).
    views: dict[Value, tuple[int, int]] = field(default_factory=dict)
    steps: list[dict[int, Any]] = field(default_factory=list)
    # Layer -> (number of KV heads, head dim), or None for a state.
    kv: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    ropes: dict[int, Rope] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    experts: list[ExpertBlock] = field(default_factory=list)
    inputs: int = 0
    normed: int = 0
    parts: int = 0
    gate_up: int = 0
    qkv: int = 0

    def place(self, x: object) -> Place:
        """Return the location of a value, or raise CannotCompileError for an array of the definition's own."""
        if not isinstance(x, Value) or x not in self.places:
            raise CannotCompileError("an operation on an array that no operation has returned")
        return self.places[x]

    def emit(self, op: int, is_wanted: bool, **words: Any) -> dict[int, Any]:
        step = {layout.OP: op, layout.WANTED: int(is_wanted), layout.A_AT: None, layout.B_AT: None}
        step |= {layout.C_AT: None, layout.D_AT: None}
        step |= {getattr(layout, name): value for name, value in words.items()}
        self.steps.append(step)
        return step

    def read(self, step: dict[int, Any], first: int, place: Place) -> None:
        """Set an input of a step; `first` is A_AT, B_AT, C_AT or D_AT."""
        step[first], step[first + 1], step[first + 2] = place.buffer, place.column, place.buffer.width

    def new(self, width: int, is_wanted: bool, head_dim: int = 0) -> Place:
        return Place(Buffer(width), 0, width, is_wanted, head_dim)

    def whole(self, place: Place) -> Place:
        """Return a place with the same value in contiguous rows, copied if necessary."""
        return place if place.is_whole else self.copied(place, is_wanted=place.is_wanted)

    def copied(self, place: Place, *, is_wanted: bool) -> Place:
        out = self.new(place.width, is_wanted, place.head_dim)
        from_all = int(is_wanted and not place.is_wanted)
        step = self.emit(layout.COPY, is_wanted, OUT=out.buffer, ROW_WIDTH=place.width, FROM_ALL=from_all)
        self.read(step, layout.A_AT, place)
        return out

    def project(self, x: Value, block: Block, residual: Value | None = None) -> Place:
        source = self.whole(self.place(x))
        if source.width != block.n_inputs:
            raise CannotCompileError(f"a product of {block.n_inputs} columns with {source.width}")
        out = self.new(block.n_outputs, source.is_wanted)
        added = None if residual is None else self.residual(residual, out)
        step = self.emit(layout.PROJECT, source.is_wanted, OUT=out.buffer, STEP_BLOCK=block.address)
        self.read(step, layout.A_AT, source)
        if added is not None:
            self.read(step, layout.B_AT, added)
        self.inputs = max(self.inputs, block.n_inputs)
        if block.norm is not None or block.n_inputs % layout.LANES:
            self.normed = max(self.normed, block.n_inputs)
        self.kept.append(block)
        return out

    def residual(self, x: Value, out: Place) -> Place:
        """Return the location of a value in contiguous rows that is added to `out`."""
        added = self.whole(self.place(x))
        if (added.width, added.is_wanted) != (out.width, out.is_wanted):
            raise CannotCompileError("a residual of a different shape")
        return added

    # ---- operations, with the arguments of `Backend`'s ----

    def norm_project(self, x: Value, norm: Norm | None, projections: Any) -> tuple[Place, ...]:
        block = self.builders.block(tuple(projections), norm, None, None)
        out = self.project(x, block)
        self.qkv += len(projections) == 3
        return tuple(replace(out, column=c.start, width=c.stop - c.start) for c in block.columns)

    def linear(self, x: Value, linear: Linear) -> tuple[Place, ...]:
        return (self.project(x, self.builders.block((linear,), None, None, None)),)

    def project_add(self, x: Value, projection: Linear, residual: Value) -> tuple[Place, ...]:
        return (self.project(x, self.builders.block((projection,), None, None, None), residual),)

    def project_norm(self, x: Value, projection: Linear, norm: Norm) -> tuple[Place, ...]:
        return (self.project(x, self.builders.block((projection,), None, None, norm)),)

    def project_norm_add(self, x: Value, projection: Linear, norm: Norm, residual: Value) -> tuple[Place, ...]:
        return (self.project(x, self.builders.block((projection,), None, None, norm), residual),)

    def norm_gate_up(
        self, x: Value, norm: Norm | None, gate: Linear, up: Linear, activation: Activation
    ) -> tuple[Place, ...]:
        self.gate_up += 1
        return (self.project(x, self.builders.block((gate, up), norm, activation, None)),)

    def norm_up(self, x: Value, norm: Norm | None, up: Linear, activation: Activation) -> tuple[Place, ...]:
        return (self.project(x, self.builders.block((up,), norm, activation, None)),)

    def norm_experts(self, x: Value, norm: Norm, experts: Experts) -> tuple[Place, ...]:
        return (self.mixture(x, self.builders.experts(norm, experts, False), None),)

    def norm_experts_add(
        self, x: Value, norm: Norm, experts: Experts, residual: Value | None = None
    ) -> tuple[Place, ...]:
        return (self.mixture(x, self.builders.experts(norm, experts, True), residual),)

    def mixture(self, x: Value, block: ExpertBlock, residual: Value | None) -> Place:
        source = self.whole(self.place(x))
        out = self.new(block.width, source.is_wanted)
        added = None if residual is None else self.residual(residual, out)
        step = self.emit(layout.EXPERTS, source.is_wanted, OUT=out.buffer, STEP_BLOCK=block.address)
        self.read(step, layout.A_AT, source)
        if added is not None:
            self.read(step, layout.B_AT, added)
        self.experts.append(block)
        return out

    def norm(self, x: Value, norm: Norm | None) -> tuple[Place, ...]:
        if self.place(x).head_dim:
            raise CannotCompileError("the norm of heads alone")
        return (self.place(x) if norm is None else self.norm_sum(x, norm, None),)

    def norm_add(self, x: Value, norm: Norm | None, residual: Value) -> tuple[Place, ...]:
        return (self.norm_sum(x, norm, residual),)

    def norm_sum(self, x: Value, norm: Norm | None, residual: Value | None) -> Place:
        source = self.whole(self.place(x))
        if norm is not None and norm.weight.size != source.width:
            raise CannotCompileError("the norm of another width")
        out, words = self.new(source.width, source.is_wanted), None if norm is None else norm_words(norm)
        added = None if residual is None else self.residual(residual, out)
        of = 0 if words is None else address(words)
        step = self.emit(layout.NORM_ADD, source.is_wanted, OUT=out.buffer, ROW_WIDTH=source.width, STEP_BLOCK=of)
        self.read(step, layout.A_AT, source)
        if added is not None:
            self.read(step, layout.B_AT, added)
        self.kept += [norm, words]
        return out

    def all_sum(self, x: Value) -> tuple[Place, ...]:
        return (self.exchange(layout.ALL_SUM, x, self.place(x).width),)

    def all_columns(self, x: Value, n: int) -> tuple[Place, ...]:
        return (self.exchange(layout.ALL_COLUMNS, x, n),)

    def exchange(self, op: int, x: Value, width: int) -> Place:
        """Add a step that the program makes between two calls of the kernels; its result is `width` wide."""
        source = self.whole(self.place(x))
        out = self.new(width, source.is_wanted, source.head_dim)
        step = self.emit(op, source.is_wanted, OUT=out.buffer, ROW_WIDTH=width)
        self.read(step, layout.A_AT, source)
        return out

    def heads(self, x: Value, head_dim: int) -> tuple[Place, ...]:
        return (replace(self.place(x), head_dim=head_dim),)

    def merge(self, x: Value) -> tuple[Place, ...]:
        return (replace(self.place(x), head_dim=0),)

    def columns(self, x: Value, first: int, last: int) -> tuple[Place, ...]:
        place = self.place(x)
        return (replace(place, column=place.column + first, width=last - first),)

    def multiply(self, a: Value, b: Value) -> tuple[Place, ...]:
        left, right = self.place(a), self.place(b)
        if (left.width, left.is_wanted) != (right.width, right.is_wanted):
            raise CannotCompileError("a product of different shapes")
        out = self.new(left.width, left.is_wanted)
        step = self.emit(layout.MULTIPLY, left.is_wanted, OUT=out.buffer, ROW_WIDTH=left.width)
        self.read(step, layout.A_AT, left)
        self.read(step, layout.B_AT, right)
        return (out,)

    def scale(self, x: Value, factor: float) -> tuple[Place, ...]:
        source = self.place(x)
        out = self.new(source.width, source.is_wanted)
        step = self.emit(
            layout.SCALE, source.is_wanted, OUT=out.buffer, ROW_WIDTH=source.width, STEP_SCALE=_bits(factor)
        )
        self.read(step, layout.A_AT, source)
        return (out,)

    def take(self, x: Value, rows: object) -> tuple[Place, ...]:
        place = self.place(x)
        if rows is not self.batch.rows or place.is_wanted:
            raise CannotCompileError("rows other than the wanted rows")
        return (self.copied(place, is_wanted=True),)

    def head_norm_rope(
        self, q: Value, k: Value, v: Value, head_dim: int, norms: Any, rope: Rope, positions: object
    ) -> tuple[Place, ...]:
        a, b = self.place(q), self.place(k)
        if a.is_wanted or b.is_wanted or positions is not self.batch.positions:
            raise CannotCompileError("heads of the wanted tokens only, or other positions than the batch's")
        if a.width % head_dim or b.width % head_dim or any(norm.weight.size != head_dim for norm in norms or ()):
            raise CannotCompileError("a head dim that does not match the norms or projections")
        if rope.growth is None:
            rotated = self._rotated((a, b), head_dim, norms, rope)
        else:  # queries and keys have tables of their own
            of_q, of_k = (None, None) if norms is None else ((norm, norm) for norm in norms)
            rotated = [*self._rotated((a,), head_dim, of_q, rope), *self._rotated((b,), head_dim, of_k, rope.keys)]
        self.kept.append(norms)
        return (*rotated, replace(self.place(v), head_dim=head_dim))

    def norm_rope(self, x: Value, head_dim: int, norm: Norm, rope: Rope | None, positions: object) -> tuple[Place, ...]:
        place = self.place(x)
        if place.is_wanted or positions is not self.batch.positions:
            raise CannotCompileError("heads of the wanted tokens only, or other positions than the batch's")
        if place.width % head_dim or not isinstance(norm, RMSNorm) or norm.weight.size != head_dim:
            raise CannotCompileError("a head dim that does not match the norm or the projection")
        norms = norm, norm
        self.kept.append(norms)
        return tuple(self._rotated((place,), head_dim, norms, Rope.none(head_dim) if rope is None else rope))

    def _rotated(self, of: Sequence[Place], head_dim: int, norms: Any, rope: Rope) -> list[Place]:
        """Norm and rotate the heads of one or two values by one table."""
        out = [self.new(place.width, False, head_dim) for place in of]
        n_heads, n_others = ([place.width // head_dim for place in of] + [0])[:2]
        words = {"OUT": out[0].buffer} if len(out) == 1 else {"OUT": out[0].buffer, "OUT_2": out[1].buffer}
        block = self.builders.heads(n_heads, n_others, head_dim, norms)
        step = self.emit(
            layout.HEADS, False, STEP_BLOCK=block, N_HEADS=n_heads, N_KV_HEADS=n_others, ROW_WIDTH=head_dim, **words
        )
        for first, place in zip((layout.A_AT, layout.B_AT), of, strict=False):
            self.read(step, first, place)
        self.ropes[len(self.steps) - 1] = rope
        return out

    def kv_append(self, batch: object, layer: int, k: Value, v: Value) -> tuple[int, int]:
        """Return the layer and the number of KV heads of the KV view."""
        if batch is not self.batch:
            raise CannotCompileError("a batch other than the pass's own")
        a, b = self.place(k), self.place(v)
        if a.is_wanted or b.is_wanted or (a.width, a.head_dim) != (b.width, b.head_dim) or not a.head_dim:
            raise CannotCompileError("keys and values of the wanted tokens only, or not split into heads")
        n_heads = a.width // a.head_dim
        if layer in self.kv or a.width % a.head_dim:
            raise CannotCompileError("keys and values written twice in one layer, or a partial head")
        self.kv[layer] = (n_heads, a.head_dim)
        step = self.emit(layout.KV_APPEND, False, LAYER=layer, N_KV_HEADS=n_heads, ROW_WIDTH=a.head_dim)
        self.read(step, layout.A_AT, a)
        self.read(step, layout.B_AT, b)
        return layer, n_heads

    def attention(self, q: Value, view: Value, counts: object, scores: Scores) -> tuple[Place, ...]:
        if not isinstance(view, Value) or view not in self.views:
            raise CannotCompileError("attention over an object that is not a KV view")
        source, (layer, n_kv_heads) = self.whole(self.place(q)), self.views[view]
        if counts is not (self.batch.wanted if source.is_wanted else self.batch.lengths):
            raise CannotCompileError("counts that do not match the rows of the queries")
        head_dim = source.head_dim
        n_heads = source.width // max(1, head_dim)
        is_grouped = n_heads > 0 and n_kv_heads > 0 and n_heads % n_kv_heads == 0
        if not is_grouped or not self.builders.attends(n_heads // n_kv_heads, head_dim):
            raise CannotCompileError("a number of heads or a head dim that attention does not support")
        out = self.new(source.width, source.is_wanted, head_dim)
        step = self.emit(
            layout.ATTENTION, source.is_wanted, OUT=out.buffer, LAYER=layer, N_HEADS=n_heads, N_KV_HEADS=n_kv_heads,
            ROW_WIDTH=head_dim, STEP_SCALE=_bits(scores.scale), STEP_SOFTCAP=_bits(scores.softcap or 0.0),
            STEP_SINKS=sinks_address(scores, n_heads),
        )  # fmt: skip
        self.kept.append(scores)
        self.read(step, layout.A_AT, source)
        self.parts = max(self.parts, n_heads * (head_dim + layout.LANES))
        return (out,)

    def sigmoid_gate(self, x: Value, gate: Value) -> tuple[Place, ...]:
        a, b = self.place(x), self.place(gate)
        if (a.width, a.is_wanted) != (b.width, b.is_wanted) or a.width % layout.LANES:
            raise CannotCompileError("a gate of another shape, or of a width that the kernel does not support")
        out = self.new(a.width, a.is_wanted)
        step = self.emit(layout.GATE, a.is_wanted, OUT=out.buffer, ROW_WIDTH=a.width)
        self.read(step, layout.A_AT, a)
        self.read(step, layout.B_AT, b)
        return (out,)

    def short_conv(
        self, batch: object, layer: int, b: Value, c: Value, x: Value, conv: Convolution
    ) -> tuple[Place, ...]:
        self.begin_state(batch, layer, conv)
        return (self.convolve(layer, x, conv, self.builders.convolution(conv, False), (b, c)),)

    def delta_net(
        self, batch: object, layer: int, x: Value, gate: Value, beta: Value, step: Value, net: DeltaNet
    ) -> tuple[Place, ...]:
        self.begin_state(batch, layer, net.conv)
        if not rule_fits(net.rule):
            raise CannotCompileError("head dims of a delta rule that the kernel does not support")
        mixed = self.convolve(layer, x, net.conv, self.builders.convolution(net.conv, True), ())
        inputs = (mixed, self.place(gate), self.place(beta), self.place(step))
        out = self.new(inputs[1].width, is_wanted=False)
        emitted = self.emit(layout.DELTA, False, OUT=out.buffer, LAYER=layer, STEP_BLOCK=self.builders.rule(net))
        for first, place in zip((layout.A_AT, layout.B_AT, layout.C_AT, layout.D_AT), inputs, strict=True):
            self.read(emitted, first, place)
        self.kept.append(net)
        return (out,)

    def begin_state(self, batch: object, layer: int, conv: Convolution) -> None:
        """Note that a layer has a state, or raise CannotCompileError if the kernels do not support its convolution."""
        if batch is not self.batch or layer in self.kv or not convolution_fits(conv):
            raise CannotCompileError("a batch other than the pass's own, two states in one layer, or odd channels")
        self.kv[layer] = None

    def convolve(self, layer: int, x: Value, conv: Convolution, block: int, gates: tuple[Value, ...]) -> Place:
        places = [self.place(value) for value in (x, *gates)]
        if any(place.is_wanted or place.width != conv.weight.shape[1] for place in places):
            raise CannotCompileError("a convolution of the wanted tokens only, or of another width")
        out = self.new(places[0].width, is_wanted=False)
        step = self.emit(layout.CONVOLVE, False, OUT=out.buffer, LAYER=layer, STEP_BLOCK=block)
        for first, place in zip((layout.A_AT, layout.B_AT, layout.C_AT), places, strict=False):
            self.read(step, first, place)
        self.kept.append(conv)
        return out


def _bits(number: float) -> int:
    """Return the bits of a float64, as a word of a step."""
    return int(np.float64(number).view(np.int64))
