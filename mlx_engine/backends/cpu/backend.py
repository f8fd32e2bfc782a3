"""The CPU backends `simd` and `parallel` with compiled kernels, which multiply quantised weights as they are stored.

`simd` has one thread and `parallel` several; results are bit-identical for any number of threads. Most operations are
one call of a kernel. If no kernel supports an operation, or the shapes of its arguments, the operation runs in NumPy.

For up to 32 tokens, all layers of a model run in one call: `lowering.py` turns the definition of the layers into the
steps of a `CompiledProgram`. The steps contain the addresses of cos/sin tables and of *descriptors*, arrays of integers
that describe weights or other parameters to the kernels. The addresses of KV stores, page tables and scratch memory are
passed with each call.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import INFO
from typing import Any, cast, get_args

import numpy as np

from mlx_engine.backends.base import Layers, OpByOp, Program
from mlx_engine.backends.batch import Batch, KVSpan, KVView, Stores, Wanted
from mlx_engine.backends.cpu.descriptors import (
    FLOAT32,
    KINDS,
    Block,
    ExpertBlock,
    Matrix,
    address,
    aligned,
    contiguous,
    convolution_fits,
    heads_fit,
    norm_descriptor,
    norm_fits,
    rule_fits,
    sinks_address,
    space_fits,
    strided_rows,
    write_matrix,
    write_norm,
)
from mlx_engine.backends.cpu.expert_cache import ExpertCache, HeldExperts
from mlx_engine.backends.cpu.kernels import load_formats
from mlx_engine.backends.cpu.lowering import LOWERED, CannotCompileError, Lowered, lower
from mlx_engine.backends.experts import Experts
from mlx_engine.backends.numpy.simd import SimdBackend, one_blas_thread, rope_table
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
    Scores,
)
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library, is_format
from mlx_engine.kernels.cpu.build.pool import Pool
from mlx_engine.machine.memory import read_ahead
from mlx_engine.observe.log import event
from mlx_engine.quant import key_values
from mlx_engine.quant.group_weight import in_gguf_order
from mlx_engine.quant.weight import Weight


class CompiledBackend(SimdBackend):
    """The compiled CPU backend. Its operations share scratch memory, so they must be called inside a `session`."""

    fixes_bits = True

    def __init__(self, library: Library, name: str, threads: int, activations: str = "f32") -> None:
        self.name, self.threads, self.activations = name, threads, activations
        super().__init__()
        self.library, self.pool = library, Pool(threads, library)
        self._tasks = {
            name: library.address(name) for name in ("attend_decode", "attend_prefill", "norm_rope", "put_span")
        }
        # The matrices that `read_ahead` reads.
        self._mapped: list[np.ndarray] = []
        # Descriptors, each made at its first use. These five dicts have the descriptors of: embedding tables; blocks
        # (linear layers with the same input); mixtures of experts; the norm and rotation of heads; convolutions, delta
        # rules and state spaces.
        self._embedded: dict[Matrix, np.ndarray] = {}
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._mixtures: dict[tuple[Norm, Experts, bool], ExpertBlock] = {}
        self._heads: dict[tuple[object, ...], np.ndarray] = {}
        self._mixer_descriptors: dict[tuple[object, ...], np.ndarray] = {}
        # Keeps a bounded number of each mixture's experts in memory; None if the number is not bounded.
        self.expert_cache: ExpertCache | None = None
        self._tables: dict[Rope, tuple[np.ndarray, np.ndarray]] = {}
        self.scratch = np.empty(0, dtype=np.float32)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Wait for other threads' sessions, reserve the thread pool for this thread, and limit BLAS to one thread."""
        with self.guard.held(), one_blas_thread():
            self.pool.renew()
            if self.expert_cache is not None:
                self.expert_cache.renew()
            yield

    def close(self) -> None:
        with self.guard.close():
            self.pool.close()
            if self.expert_cache is not None:
                self.expert_cache.close()

    def sum_exp(self, row: np.ndarray, top: float) -> float:
        """Call the compiled kernel. This needs no session."""
        row, out = np.ascontiguousarray(row, dtype=np.float32), np.empty(1)
        self.library.sum_exp(address(row), len(row), top, address(out))
        return float(out[0])

    def prepare(self, weight: Weight) -> Native:
        """Keep the bytes of a matrix, usually as a view, if kernels multiply it as stored. Dequantise other weights."""
        if len(weight.shape) != 2:
            return np.array(weight.dequantize(), dtype=np.float32)
        weight, shape = in_gguf_order(weight), (weight.shape[0], weight.shape[1])
        if _is_multiplied_as_stored(weight):
            self._mapped.append(weight.data)
            return Matrix(shape, weight.type.name.lower(), weight.data)
        return Matrix(shape, FLOAT32, np.ascontiguousarray(weight.dequantize(), dtype=np.float32))

    def embeds_stored(self, table: Weight) -> bool:
        """Return True if no kernel multiplies the table as stored: `prepare` would make a float32 copy of it."""
        return not _is_multiplied_as_stored(table)

    def discard(self, linear: Linear) -> None:
        self._mapped = [data for data in self._mapped if data is not linear.weight.data]
        self._blocks = {key: block for key, block in self._blocks.items() if linear not in block.linears}

    def read_ahead(self) -> None:
        """Read all memory pages of the weights on a background thread, so that the first pass has fewer page faults."""
        mapped, self._mapped = self._mapped, []
        threading.Thread(target=read_ahead, args=(mapped,), name="mlx_engine-read-ahead", daemon=True).start()

    def embed(self, table: Native, ids: Sequence[Any]) -> Native:
        if isinstance(table, Weight):
            return table.rows(ids)
        rows = np.ascontiguousarray(ids, dtype=np.int64)
        if len(rows) and not 0 <= min(ids) <= max(ids) < table.shape[0]:
            last = table.shape[0] - 1
            raise IndexError(f"token ids must be from 0 to {last:,}, not from {min(ids):,} to {max(ids):,}")
        expanded = np.empty((len(rows), table.shape[1]), dtype=np.float32)
        descriptor = self._embedded.get(table)
        if descriptor is None:
            load_formats(self.library, {table.format})
            descriptor = self._embedded[table] = np.zeros(layout.WIDTH, dtype=np.int64)
            write_matrix(descriptor, table, self.library)
        self.library.embed(
            self.pool.address, address(descriptor), table.shape[1], address(rows), len(rows), address(expanded)
        )
        return expanded

    def linear(self, x: Native, linear: Linear) -> Native:
        return self._project(x, self._block((linear,)))

    def norm_project(self, x: Native, norm: Norm | None, projections: Sequence[Linear]) -> list[Native]:
        if not norm_fits(norm) or len(projections) > layout.MOST_MATRICES:
            return super().norm_project(x, norm, projections)
        block = self._block(tuple(projections), norm)
        y = self._project(x, block)
        return [y[:, columns] for columns in block.columns]

    def project_norm(self, x: Native, projection: Linear, norm: Norm) -> Native:
        return self._project(x, self._block((projection,), post=norm))

    def project_add(self, x: Native, projection: Linear, residual: Native) -> Native:
        return self._project(x, self._block((projection,)), residual)

    def project_norm_add(self, x: Native, projection: Linear, norm: Norm, residual: Native) -> Native:
        return self._project(x, self._block((projection,), post=norm), residual)

    def norm_gate_up(self, x: Native, norm: Norm | None, gate: Linear, up: Linear, activation: Activation) -> Native:
        if not norm_fits(norm):
            return super().norm_gate_up(x, norm, gate, up, activation)
        return self._project(x, self._block((gate, up), norm, KINDS[activation]))

    def norm_up(self, x: Native, norm: Norm | None, up: Linear, activation: Activation) -> Native:
        if not norm_fits(norm):
            return super().norm_up(x, norm, up, activation)
        return self._project(x, self._block((up,), norm, KINDS[activation]))

    def norm_experts(self, x: Native, norm: Norm, experts: Experts) -> Native:
        return self._run_experts(x, self.expert_block(norm, experts, False), None)

    def norm_experts_add(self, x: Native, norm: Norm, experts: Experts, residual: Native | None = None) -> Native:
        return self._run_experts(x, self.expert_block(norm, experts, True), residual)

    def _run_experts(self, x: Native, block: ExpertBlock, residual: Native | None) -> Native:
        """Run router and experts in one call of the kernels."""
        x = contiguous(x)
        added = x if residual is None else contiguous(residual)
        y, scratch = aligned(*x.shape), self.scratch_address(block.floats(len(x)))
        self.run_entry(self.library.run_experts, block.address, len(x), address(x), address(added), scratch, address(y))
        return y

    def norm(self, x: Native, norm: Norm | None) -> Native:
        # If x has heads, (T, H, E), the norm runs in NumPy.
        return super().norm(x, norm) if norm is None or x.ndim != 2 else self._norm_add(x, norm, None)

    def norm_add(self, x: Native, norm: Norm | None, residual: Native) -> Native:
        return self._norm_add(x, norm, residual)

    def _norm_add(self, x: Native, norm: Norm | None, residual: Native | None) -> Native:
        x, y, added = contiguous(x), aligned(*x.shape), None if residual is None else contiguous(residual)
        descriptor = norm_descriptor(norm)
        self.run_entry(
            self.library.norm_add, address(descriptor), *x.shape, address(x), address(added), address(y)
        )  # fmt: skip
        return y

    def stack(self, linears: Sequence[Linear]) -> Native:
        """Exclude the experts' weights from `read_ahead`. An expert is read from the file when a token chooses it."""
        unread = {id(linear.weight.data) for linear in linears}
        self._mapped = [data for data in self._mapped if id(data) not in unread]
        return super().stack(linears)

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> Native:
        """Return zeros, whose memory the operating system maps only when a slot is written."""
        return aligned(n_slots, *shape, make=np.zeros)

    holds_some_experts = True

    def stack_some(self, read: Callable[[int], Linear], n: int, n_slots: int) -> Native:
        """Return the experts' layers as views of the file.

        The operation `expert_linear` reads these views. The kernel `run_experts`, which runs a whole mixture, reads the
        copies in the `ExpertCache` instead.
        """
        held = HeldExperts(self.stack([read(e) for e in range(n)]))
        held.n_slots = n_slots
        return held

    def norm_head(self, x: Native, norm: Norm, head: Linear) -> Native:
        return self._project(x, self._block((head,), norm)) if norm_fits(norm) else super().norm_head(x, norm, head)

    def _project(self, x: np.ndarray, block: Block, residual: np.ndarray | None = None) -> np.ndarray:
        n, x = len(x), contiguous(x)
        y = aligned(n, block.n_outputs)
        added = None if residual is None else contiguous(residual)
        needs_scratch = n > 1 or not block.has_gemv or block.n_fixed
        scratch = self.scratch_address(n * layout.product_floats(block.n_inputs)) if needs_scratch else 0
        self.run_entry(self.library.project, block.address, n, address(x), address(added), scratch, address(y))
        return y

    def _block(
        self, linears: tuple[Linear, ...], norm: Norm | None = None, activation: int = 0, post: Norm | None = None
    ) -> Block:
        key = (activation, norm, post, *linears)
        block = self._blocks.get(key)
        if block is None:
            fixed = self.activations == "i16"
            load_formats(self.library, {linear.weight.format for linear in linears}, fixed=fixed)
            block = self._blocks[key] = Block(linears, norm, activation, self.library, post, fixed=fixed)
        return block

    def scratch_address(self, n: int) -> int:
        """Return the address of scratch memory for n floats.

        All calls share this memory, because the first use of new memory causes page faults. If a call needs more floats
        than the memory has, the memory is replaced, and addresses that were returned before are invalid.
        """
        if self.scratch.size < n:
            self.scratch = aligned(n)
        return address(self.scratch)

    def run_entry(self, entry: Callable[..., None], *arguments: float) -> None:
        """Wake the pool's parked (sleeping) worker threads, then call a compiled entry point.

        Compiled code cannot wake threads, so the flag `ON` keeps workers from parking during the call.
        """
        self.pool.control[layout.ON] = 1  # before `wake`, so that no worker parks between `wake` and the call
        try:
            self.pool.shared.wake()
            entry(self.pool.address, *arguments)
        finally:
            self.pool.control[layout.ON] = 0
        if self.expert_cache is not None:
            self.expert_cache.check()

    def head_norm_rope(
        self, q: Native, k: Native, v: Native, head_dim: int, norms: HeadNorms, rope: Rope, positions: Sequence[int]
    ) -> tuple[Native, Native, Native]:
        if rope.growth is None:
            rotated = self._norm_rope(q, k, head_dim, norms, rope, positions)
        else:  # queries and keys have separate tables
            of_q, of_k = (None, None) if norms is None else ((norm, norm) for norm in norms)
            rotated = (
                self._norm_rope(q, q[:, :0], head_dim, of_q, rope, positions)[0],
                self._norm_rope(k, k[:, :0], head_dim, of_k, rope.keys, positions)[0],
            )
        return (*rotated, v.reshape(len(v), -1, head_dim))

    def norm_rope(
        self, x: Native, head_dim: int, norm: RMSNorm | None, rope: Rope | None, positions: Sequence[int]
    ) -> Native:
        table, norms = Rope.none(head_dim) if rope is None else rope, None if norm is None else (norm, norm)
        return self._norm_rope(x, x[:, :0], head_dim, norms, table, positions)[0]

    def _norm_rope(
        self, q: Native, k: Native, head_dim: int, norms: HeadNorms, rope: Rope, positions: Sequence[int]
    ) -> tuple[Native, Native]:
        """Norm and rotate the heads of q (T, H*E) and k (T, G*E) with one cos/sin table; G may be 0."""
        cos, sin = self.rope_table(rope, max(positions) + 1)
        at = np.array(positions, dtype=np.int64)
        n, n_q, n_k = len(q), q.shape[1] // head_dim, k.shape[1] // head_dim
        q_out = np.empty((n, n_q, head_dim), dtype=np.float32)
        k_out = np.empty((n, n_k, head_dim), dtype=np.float32)
        block, q, k = self.head_block(n_q, n_k, head_dim, norms), strided_rows(q), strided_rows(k)
        self.run_entry(
            self.library.norm_rope_pair, block, n, address(at), address(q), q.strides[0] // 4, address(k),
            k.strides[0] // 4, address(cos), address(sin), address(q_out), address(k_out),
        )  # fmt: skip
        return q_out, k_out

    def head_block(self, n_q: int, n_k: int, head_dim: int, norms: HeadNorms) -> int:
        """Return the address of the descriptor of the norm and rotation of `n_q` query heads and `n_k` key heads."""
        key = (n_q, n_k, head_dim, *(norms or ()))
        descriptor = self._heads.get(key)
        if descriptor is None:
            descriptor = self._heads[key] = np.zeros(layout.K_NORM_EPS + 1, dtype=np.int64)
            descriptor[: layout.HEAD_DIM + 1] = self._tasks["norm_rope"], n_q, n_k, head_dim
            if norms:
                write_norm(descriptor[layout.Q_NORM_WEIGHT : layout.K_NORM_WEIGHT], norms[0])
                write_norm(descriptor[layout.K_NORM_WEIGHT :], norms[1])
        return address(descriptor)

    def rope_table(self, rope: Rope, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a cos/sin table of at least `length` positions. If the kept table is shorter, replace it."""
        found = self._tables.get(rope)
        if found is None or len(found[0]) < length:
            found = self._tables[rope] = rope_table(rope, range(max(512, 1 << (length - 1).bit_length())))
        return found

    def kv_write(self, store: Native, slots: np.ndarray, k: Native, v: Native) -> Native:
        n, n_heads, width = k.shape
        row = (n_heads, key_values.row_length(width, self.kv_type)) if heads_fit(1, width, self.kv_type) else None
        # NumPy handles all arguments that the kernel does not support, and raises an error if their shapes are wrong.
        fits = n == len(slots) > 0 and slots.min() >= 0 and slots.max() < store.shape[2] and slots.strides == (8,)
        fits = fits and len(store) == 2 and k.shape == v.shape and store.shape[1::2] == row and store.flags.c_contiguous
        if not fits or any(x.strides[1:] != (4 * width, 4) for x in (k, v)):
            return super().kv_write(store, slots, k, v)
        self.run_entry(
            self.library.put_pair, self._tasks["put_span"], n, n_heads, width, address(k), k.strides[0] // 4,
            address(v), v.strides[0] // 4, address(store), layout.KV_TYPES[self.kv_type], store.shape[2],
            address(slots),
        )  # fmt: skip
        return store

    def attention(self, q: Native, kv: KVView, counts: Sequence[int], scores: Scores) -> Native:
        n, n_heads, width = q.shape
        n_arrays, n_kv_heads, slots, _ = kv.store.shape
        if not heads_fit(n_heads // n_kv_heads, width, self.kv_type) or not kv.store.flags.c_contiguous:
            return super().attention(q, kv, counts, scores)
        q, out, sequences = contiguous(q), aligned(*q.shape), sequence_descriptors(kv.spans, counts, counts)
        parts = self.scratch_address(parts_of(kv.spans, counts) * n_heads * (width + layout.LANES))
        self.run_entry(
            self.library.attend, self._tasks["attend_decode"], self._tasks["attend_prefill"], address(q), n, n_heads,
            n_kv_heads, width, address(kv.store), layout.KV_TYPES[self.kv_type], slots, n_arrays, kv.page,
            kv.window or 0, address(sequences), len(sequences),
            layout.SEQ_NEW, scores.scale, scores.softcap or 0.0, sinks_address(scores, n_heads), parts, address(out),
        )  # fmt: skip
        return out

    def soft_cap(self, x: Native, cap: float) -> Native:
        """Call the compiled tanh, which has the same bits on every processor."""
        x, out = contiguous(x), np.empty(x.shape, dtype=np.float32)
        self.library.soft_cap(address(x), x.size, cap, address(out))
        return out

    def compile(self, layers: Layers, width: int) -> Program:
        """Return a program of compiled steps. If the kernels lack an operation, log this and return `OpByOp`.

        Also return `OpByOp` if a subclass overrides an operation, because compiled steps would not call the override.
        """
        try:
            self._check_overrides()
            return CompiledProgram(self, {want: lower(self, layers, width, want) for want in get_args(Wanted)})
        except CannotCompileError as error:
            event(INFO, "op_by_op", backend=self.name, reason=str(error))
            return OpByOp(self, layers, str(error))

    def _check_overrides(self) -> None:
        """Raise CannotCompileError if this backend overrides an operation that has a compiled step."""
        for name in (*LOWERED, "kv_write", "kv_append"):
            if name in vars(self) or getattr(type(self), name) is not getattr(CompiledBackend, name):
                raise CannotCompileError(f"the operation {name}, which {type(self).__name__} overrides")

    def expert_block(self, norm: Norm, experts: Experts, adds: bool) -> ExpertBlock:
        """Return a mixture of experts in encoded form, for `norm_experts_add` if `adds`, else for `norm_experts`."""
        block = self._mixtures.get((norm, experts, adds))
        if block is None:
            fixed = self.activations == "i16"
            linears = [*experts.dense, *(linear for of in experts.matrices for linear in of.weights)]
            load_formats(self.library, {linear.weight.format for linear in linears}, fixed=fixed)
            block = ExpertBlock(experts, norm, KINDS[experts.activation], self.library, adds=adds, fixed=fixed)
            if isinstance(experts.up.weights, HeldExperts):
                self.expert_cache = self.expert_cache or ExpertCache(self.library)
                self.expert_cache.add(block, experts.up.weights.n_slots)
            self._mixtures[norm, experts, adds] = block
        return block

    def step_block(
        self, linears: tuple[Linear, ...], norm: Norm | None = None, activation: Activation | None = None,
        post: Norm | None = None,
    ) -> Block:  # fmt: skip
        """Return a block of linear layers for a step of a program.

        Raises:
            CannotCompileError: the norm is too wide for the kernels, or there are too many linear layers.
        """
        if not norm_fits(norm):
            raise CannotCompileError("a norm that is too wide")
        if len(linears) > layout.MOST_MATRICES:
            raise CannotCompileError("too many matrices")
        return self._block(linears, norm, 0 if activation is None else KINDS[activation], post)

    # ---- gates, and mixers with states: short convolutions, gated delta nets, Mamba2 ----
    # States are read and written in their slots, without a copy.

    def sigmoid_gate(self, x: Native, gate: Native) -> Native:
        return super().sigmoid_gate(x, gate) if x.shape[1] % layout.LANES else self._gate_rows(0, x, gate)

    def gated(self, gate: Native, up: Native, gating: Gating) -> Native:
        if up.shape[1] % layout.LANES:
            return super().gated(gate, up, gating)
        return self._gate_rows(KINDS[gating], up, gate)

    def activate(self, x: Native, activation: Activation) -> Native:
        if x.ndim != 2 or x.shape[1] % layout.LANES:
            return super().activate(x, activation)
        return self._gate_rows(KINDS[activation], None, x)

    def _gate_rows(self, kind: int, x: Native | None, gate: Native) -> Native:
        """Return `activation(gate)` (T, N), times x if x is given; for clamped SwiGLU, `clamped_swiglu(gate, x)`.

        `kind` is the number of the activation, or of clamped SwiGLU, in `KINDS`; 0 for the activation sigmoid.
        """
        gate, out = strided_rows(gate), aligned(*gate.shape)
        x = None if x is None else strided_rows(x)
        row = 0 if x is None else x.strides[0] // 4
        self.run_entry(
            self.library.gate_rows, self.library.address("gate_span"), kind, *gate.shape, address(x), row,
            address(gate), gate.strides[0] // 4, address(out),
        )  # fmt: skip
        return out

    def short_conv(self, batch: Batch, layer: int, b: Native, c: Native, x: Native, conv: Convolution) -> Native:
        if not convolution_fits(conv):
            return super().short_conv(batch, layer, b, c, x, conv)
        return self._convolved(batch, layer, x, conv, self.convolution_descriptor(conv, False), before=b, after=c)

    def delta_net(
        self, batch: Batch, layer: int, x: Native, gate: Native, beta: Native, step: Native, net: DeltaNet
    ) -> Native:
        if not convolution_fits(net.conv) or not rule_fits(net.rule):
            return super().delta_net(batch, layer, x, gate, beta, step, net)
        mixed = self._convolved(batch, layer, x, net.conv, self.convolution_descriptor(net.conv, True))
        store, runs = cast(np.ndarray, batch.stores.states[layer][1]), contiguous(batch.runs)
        gate, beta, step, out = strided_rows(gate), strided_rows(beta), strided_rows(step), aligned(*gate.shape)
        self.run_entry(
            self.library.delta_net, self.rule_descriptor(net), address(mixed), address(gate), gate.strides[0] // 4,
            address(beta), beta.strides[0] // 4, address(step), step.strides[0] // 4, address(store), address(runs),
            len(runs), address(out),
        )  # fmt: skip
        return out

    def mamba2(self, batch: Batch, layer: int, gate: Native, x: Native, step: Native, net: Mamba2) -> Native:
        if not convolution_fits(net.conv) or not space_fits(net):
            return super().mamba2(batch, layer, gate, x, step, net)
        mixed = self._convolved(batch, layer, x, net.conv, self.convolution_descriptor(net.conv, True))
        store, runs = cast(np.ndarray, batch.stores.states[layer][1]), contiguous(batch.runs)
        gate, step, out = strided_rows(gate), strided_rows(step), aligned(*gate.shape)
        self.run_entry(
            self.library.state_space, self.space_descriptor(net), len(mixed), address(mixed), address(gate),
            gate.strides[0] // 4, address(step), step.strides[0] // 4, address(store), address(runs), len(runs),
            address(out),
        )  # fmt: skip
        return out

    def _convolved(
        self, batch: Batch, layer: int, x: Native, conv: Convolution, block: int, before: Native | None = None,
        after: Native | None = None,
    ) -> Native:  # fmt: skip
        kept = [None if gate is None else strided_rows(gate) for gate in (before, after)]
        gates = [word for gate in kept for word in (address(gate), 0 if gate is None else gate.strides[0] // 4)]
        store, runs = cast(np.ndarray, batch.stores.states[layer][0]), contiguous(batch.runs)
        x, out = strided_rows(x), aligned(*x.shape)
        self.run_entry(
            self.library.short_conv, block, len(x), address(x), x.strides[0] // 4, *gates, address(store),
            address(runs), len(runs), address(out),
        )  # fmt: skip
        return out

    def convolution_descriptor(self, conv: Convolution, activated: bool) -> int:
        """Return the address of a convolution's descriptor. If `activated`, SiLU is applied to the result."""
        found = self._mixer_descriptors.get((conv, activated))
        if found is None:
            taps, channels = conv.weight.shape
            task = self.library.address("convolve_span")
            values = (task, address(conv.weight), taps, channels, int(activated), address(conv.bias))
            found = self._mixer_descriptors[conv, activated] = np.array(values, dtype=np.int64)
        return address(found)

    def rule_descriptor(self, net: DeltaNet) -> int:
        """Return the address of a delta rule's descriptor."""
        rule, found = net.rule, self._mixer_descriptors.get((net,))
        if found is None:
            found = self._mixer_descriptors[net,] = np.zeros(layout.DELTA_WIDTH, dtype=np.int64)
            shared = rule.n_value_heads // rule.n_key_heads if rule.are_neighbors else 1
            found[: layout.DELTA_SHARED + 1] = (
                self.library.address("delta_head"), address(rule.rate), address(rule.dt_bias), rule.n_key_heads,
                rule.key_dim, rule.n_value_heads, rule.value_dim, shared,
            )  # fmt: skip
            write_norm(found[layout.DELTA_NORM :], net.norm)
        return address(found)

    def space_descriptor(self, net: Mamba2) -> int:
        """Return the address of a state space's descriptor."""
        space, found = net.space, self._mixer_descriptors.get((net,))
        if found is None:
            found = self._mixer_descriptors[net,] = np.zeros(layout.SPACE_WIDTH, dtype=np.int64)
            found[: layout.SPACE_NORM] = (
                self.library.address("space_head"), self.library.address("space_norm"), address(space.rate),
                address(space.dt_bias), address(space.skip), space.n_heads, space.head_dim, space.n_groups,
                space.state_dim,
            )  # fmt: skip
            if net.norm is not None:
                write_norm(found[layout.SPACE_NORM :], net.norm)
            found[layout.SPACE_NORM_GROUPS] = net.norm_groups
        return address(found)


def _is_multiplied_as_stored(weight: Weight) -> bool:
    """Return whether the kernels multiply this type as stored. False for F32, which may be unaligned in the file."""
    return is_format(weight.type.name.lower())


# A program begins with int64 words that have the addresses of kernels. This table maps the index of each word to the
# name of the kernel, and to the operation of the steps that call the kernel. If no step has this operation, the kernel
# may not be compiled, and the word is 0. If the operation is None, the kernel is always compiled.
_CALLED = {
    layout.ENTRY_PROJECT: ("project", None),
    layout.ENTRY_ATTEND: ("attend", None),
    layout.TASK_ATTEND_DECODE: ("attend_decode", None),
    layout.TASK_ATTEND_PREFILL: ("attend_prefill", None),
    layout.ENTRY_HEADS: ("norm_rope_pair", None),
    layout.ENTRY_PUT: ("put_pair", None),
    layout.TASK_PUT_SPAN: ("put_span", None),
    layout.ENTRY_NORM_ADD: ("norm_add", None),
    layout.ENTRY_EXPERTS: ("run_experts", layout.EXPERTS),
    layout.ENTRY_GATE: ("gate_rows", layout.GATE),
    layout.TASK_GATE: ("gate_span", layout.GATE),
    layout.ENTRY_CONVOLVE: ("short_conv", layout.CONVOLVE),
    layout.ENTRY_DELTA: ("delta_net", layout.DELTA),
    layout.ENTRY_SPACE: ("state_space", layout.SPACE),
}


class CompiledProgram(Program):
    """All layers of a model as steps of the compiled kernels.

    A pass of up to `PROGRAM_TOKENS` tokens runs all steps in one call of the kernels; a longer pass makes a call per
    step. If ranks (processes) share the model, a call ends before each exchange of values between ranks. `_layers` has
    the addresses of the KV stores and states that the last pass has used.
    """

    def __init__(self, backend: CompiledBackend, variants: Mapping[Wanted, Lowered]) -> None:
        self._backend, self._kv = backend, variants["every"].kv
        # The stores whose addresses are in `_layers`. The reference is weak, so that the stores can be freed.
        self._stores: weakref.ReferenceType[Stores] | None = None
        self._layers = np.zeros((len(self._kv), layout.KV_WIDTH), dtype=np.int64)
        self._groups = np.zeros((len(self._kv), layout.GROUP_WIDTH), dtype=np.int64)
        self._variants = {
            want: _Steps(backend, lowered, self._layers, self._groups) for want, lowered in variants.items()
        }
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        self._positions = 0

    def run(self, x: Native, batch: Batch) -> Native:
        length = max(batch.positions) + 1
        if self._positions < length:
            self._bind_rope(length)
        if self._stores is None or self._stores() is not batch.stores:
            self._bind_stores(batch)
        return self._variants[batch.want].run(x, batch)

    def _bind_rope(self, length: int) -> None:
        """Write the addresses of cos/sin tables of at least `length` positions into the steps of all variants."""
        variants = self._variants.values()
        tables = {rope: self._backend.rope_table(rope, length) for steps in variants for rope in steps.ropes.values()}
        # Keep the old tables alive until all addresses are replaced.
        self._tables += tables.values()
        for steps in variants:
            for i, rope in steps.ropes.items():
                cos, sin = tables[rope]
                steps.words[i, [layout.COS, layout.SIN]] = address(cos), address(sin)
        self._tables = list(tables.values())
        self._positions = min((len(cos) for cos, _ in self._tables), default=sys.maxsize)

    def _bind_stores(self, batch: Batch) -> None:
        """Write the descriptor of each layer into `_layers`: its KV store, window, page tables and state."""
        stores = batch.stores
        layers = cast(list[np.ndarray | None], stores.layers)
        type_ = self._backend.kv_type
        rows = [None if kv is None else (kv[2], kv[0], key_values.row_length(kv[1], type_)) for kv in self._kv]
        rows += [None] * (len(layers) - len(rows))
        found = [None if store is None else (*store.shape[:2], store.shape[3]) for store in layers]
        if found != rows:
            raise ValueError(
                f"KV stores of {type_}: expected (arrays, KV heads, row length) by layer {rows}, found {found}"
            )
        for layer, (descriptor, store) in enumerate(zip(self._layers, layers, strict=False)):
            if states := stores.states[layer] if stores.states else ():
                addresses = [address(state) for state in cast(tuple[np.ndarray, ...], states)]
                descriptor[layout.STATE_STORE : layout.STATE_STORE + len(addresses)] = addresses
            if store is None:
                continue
            descriptor[layout.KV_STORE], descriptor[layout.KV_SLOTS] = address(store), store.shape[2]
            descriptor[layout.KV_WINDOW] = batch.group(layer).window or 0
            descriptor[layout.KV_ARRAYS] = len(store)
            descriptor[layout.KV_TYPE] = layout.KV_TYPES[type_]
            descriptor[layout.KV_GROUP] = address(self._groups[stores.group_of[layer]])
        self._stores = weakref.ref(stores)


class _Steps:
    """The encoded steps (int64 words) of a program for one value of `Batch.want`.

    Attributes:
        words: (number of steps, STEP_WIDTH) the words of each step.
        ropes: maps the index of each step with a rotary embedding to this embedding.
    """

    def __init__(self, backend: CompiledBackend, lowered: Lowered, layers: np.ndarray, groups: np.ndarray) -> None:
        self._backend, self._of, self._layers, self._groups = backend, lowered, layers, groups
        self.ropes = lowered.ropes
        operations = {None, *lowered.steps[:, layout.OP].tolist()}
        self._encoded = np.zeros(layout.STEPS + lowered.steps.size, dtype=np.int64)
        for word, (name, operation) in _CALLED.items():
            if operation in operations:
                self._encoded[word] = backend.library.address(name)
        self._encoded[layout.STEPS :] = lowered.steps.reshape(-1)
        self.words = self._encoded[layout.STEPS :].reshape(lowered.steps.shape)
        are_exchanges = np.isin(self.words[:, layout.OP], (layout.ALL_SUM, layout.ALL_COLUMNS))
        self._exchanges = np.flatnonzero(are_exchanges).tolist()

    def run(self, x: np.ndarray, batch: Batch) -> np.ndarray:
        """Run all steps on hidden states (T, width), and return the hidden states after the last step."""
        n, of, be = len(x), self._of, self._backend
        sequences = [sequence_descriptors(group.spans, batch.lengths, batch.wanted) for group in batch.groups]
        for descriptor, of_group, group in zip(self._groups, sequences, batch.groups, strict=False):
            descriptor[:] = address(of_group), address(group.slots)
        forward_pass = _pass_descriptor(batch)
        spans = batch.groups[0].spans if batch.groups else ()
        parts = max(parts_of(spans, counts) for counts in (batch.lengths, batch.wanted)) if spans else 0
        work = n * of.inputs
        work = max(work, *(block.floats(n) for block in of.experts)) if of.experts else work
        scratch = be.scratch_address(n * of.floats + work + parts * of.parts)
        values = be.scratch[: n * of.floats]
        values[n * of.x.at : n * (of.x.at + of.x.width)] = x.reshape(-1)
        work_address = scratch + 4 * n * of.floats
        arguments = address(forward_pass), address(self._layers), scratch, work_address, work_address + 4 * work
        for first, last in self._calls(n):
            be.run_entry(be.library.run_steps, address(self._encoded), first, last, *arguments)
            if last in self._exchanges:
                self._exchange(self.words[last], values, batch)
        n_rows = len(batch.rows) if of.y.is_wanted else n
        y = values[n * of.y.buffer.at :][: n_rows * of.y.width]
        return np.array(y.reshape(n_rows, of.y.width))

    def _calls(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield the range of steps [first, end) of each call of the kernels, for a pass of n tokens.

        Exchanges between ranks are in no range. Ctrl-C takes effect only at the end of a call, so in a pass of many
        tokens each step is a separate call.
        """
        first = 0
        for end in (*self._exchanges, len(self.words)):
            together = max(1, end - first) if n <= layout.PROGRAM_TOKENS else 1
            yield from ((at, min(at + together, end)) for at in range(first, max(end, first + 1), together))
            first = end + 1

    def _exchange(self, step: np.ndarray, values: np.ndarray, batch: Batch) -> None:
        """Run an exchange between ranks: read its input from `values`, and write its result to `values`."""
        be, n, width = self._backend, len(batch.positions), int(step[layout.ROW_WIDTH])
        n_rows = len(batch.rows) if step[layout.WANTED] else n
        x = cast(Array, values[n * step[layout.A_AT] :][: n_rows * step[layout.A_ROW]].reshape(n_rows, -1))
        y = be.all_sum(x) if step[layout.OP] == layout.ALL_SUM else be.all_columns(x, width)
        values[n * step[layout.OUT] :][: n_rows * width] = be.host(y).reshape(-1)


def _pass_descriptor(batch: Batch) -> np.ndarray:
    """Return the parameters of a pass as int64 words, followed by the positions and the indices of wanted rows."""
    n, n_rows = len(batch.positions), len(batch.rows)
    descriptor = np.empty(layout.PASS_WIDTH + n + n_rows, dtype=np.int64)
    positions = address(descriptor) + descriptor.itemsize * layout.PASS_WIDTH
    descriptor[: layout.PASS_WIDTH] = (
        n, n_rows, len(batch.lengths), batch.stores.page, positions, positions + descriptor.itemsize * n,
        address(batch.runs) if len(batch.runs) else 0, len(batch.runs),
    )  # fmt: skip
    descriptor[layout.PASS_WIDTH : layout.PASS_WIDTH + n] = batch.positions
    descriptor[layout.PASS_WIDTH + n :] = batch.rows
    return descriptor


def sequence_descriptors(spans: Sequence[KVSpan], lengths: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    """Return (B, SEQ_WIDTH) int64: each sequence's page table address, length, and numbers of new and wanted tokens."""
    descriptor = np.empty((len(spans), layout.SEQ_WIDTH), dtype=np.int64)
    descriptor[:, : layout.SEQ_WANTED + 1] = [
        (address(span.pages), span.length, n_new, n_wanted)
        for span, n_new, n_wanted in zip(spans, lengths, wanted, strict=True)
    ]
    return descriptor


def parts_of(spans: Sequence[KVSpan], counts: Sequence[int]) -> int:
    """Return the number of partial results of attention per head: one for each pair of a query and a block of keys.

    `counts` has the number of queries of each sequence. For more than `SMALL_BATCH` queries in all, return 0, because
    the kernel then keeps no partial results: it merges each block of keys into the result immediately.
    """
    if sum(counts) > layout.SMALL_BATCH:
        return 0
    return sum(n * -(-span.length // layout.BLOCK) for span, n in zip(spans, counts, strict=True))
