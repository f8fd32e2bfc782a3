"""Programs of the compiled CPU backend: run lowered steps, after binding scratch memory, cos/sin and page tables."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mlx_engine.backends.base import Program
from mlx_engine.backends.batch import Batch, KVSpan, Stores, Wanted
from mlx_engine.backends.cpu.descriptors import address
from mlx_engine.backends.cpu.lowering import Lowered
from mlx_engine.backends.parameters import Array, Native
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.quant import key_values

if TYPE_CHECKING:
    from mlx_engine.backends.cpu.backend import CompiledBackend


# By the word of a step: the kernel that it calls, and the operation that needs the kernel. Kernels with an operation
# are compiled only for models that use the operation.
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
    """All layers as steps of the compiled kernels: one call for up to PROGRAM_TOKENS tokens, else a call per step.

    The steps have the addresses of cos/sin tables, and of the KV stores of one pool.
    """

    def __init__(self, backend: CompiledBackend, variants: Mapping[Wanted, Lowered]) -> None:
        self._backend, self._kv = backend, variants["every"].kv
        # The KV stores that `_layers` points to; a weak reference, so that they can be freed.
        self._stores: weakref.ReferenceType[Stores] | None = None
        self._layers = np.zeros((len(self._kv), layout.KV_WIDTH), dtype=np.int64)
        self._groups = np.zeros((len(self._kv), layout.GROUP_WIDTH), dtype=np.int64)
        self._variants = {
            want: _Steps(backend, lowered, self._layers, self._groups) for want, lowered in variants.items()
        }
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        self._positions = 0

    def run(self, x: Native, batch: Batch) -> Native:
        """Run the steps that were lowered for the tokens whose logits are wanted."""
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
        # Descriptors only have addresses: keep the old and the new tables alive until all are written.
        self._tables += tables.values()
        for steps in variants:
            for i, rope in steps.ropes.items():
                cos, sin = tables[rope]
                steps.words[i, [layout.COS, layout.SIN]] = address(cos), address(sin)
        self._tables = list(tables.values())
        self._positions = min((len(cos) for cos, _ in self._tables), default=sys.maxsize)

    def _bind_stores(self, batch: Batch) -> None:
        """Write the addresses of each layer's KV store and page group, or of its state."""
        stores = batch.stores
        layers = cast(list[np.ndarray | None], stores.layers)
        type_ = self._backend.kv_type
        rows = [None if kv is None else (kv[2], kv[0], key_values.row_length(kv[1], type_)) for kv in self._kv]
        rows += [None] * (len(layers) - len(rows))
        found = [None if store is None else (*store.shape[:2], store.shape[3]) for store in layers]
        if found != rows:
            raise ValueError(
                f"KV stores of {type_} must have (arrays, KV heads, elements) {rows} by layer, not {found}"
            )
        for layer, (descriptor, store) in enumerate(zip(self._layers, layers, strict=False)):
            if states := stores.states[layer] if stores.states else ():
                of_layer = cast(tuple[np.ndarray, ...], states)
                descriptor[layout.STATE_STORE : layout.STATE_STORE + len(of_layer)] = [
                    address(state) for state in of_layer
                ]
            if store is None:
                continue
            descriptor[layout.KV_STORE], descriptor[layout.KV_SLOTS] = address(store), store.shape[2]
            descriptor[layout.KV_WINDOW] = batch.group(layer).window or 0
            descriptor[layout.KV_ARRAYS] = len(store)
            descriptor[layout.KV_TYPE] = layout.KV_TYPES[type_]
            descriptor[layout.KV_GROUP] = address(self._groups[stores.group_of[layer]])
        self._stores = weakref.ref(stores)


class _Steps:
    """The encoded steps of a program (int64 words) for one kind of wanted tokens.

    Attributes:
        words: (steps, words of a step).
        ropes: rotary embeddings, by the index of the step that uses them.
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
        """Return the hidden states after the last step."""
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
        """Yield the first step of each call of the kernels for n tokens, and the one after its last.

        Ctrl-C takes effect only at the end of a call. So each step over many tokens, which takes long, is a separate
        call. Exchanges between ranks run between two calls.
        """
        first = 0
        for end in (*self._exchanges, len(self.words)):
            together = max(1, end - first) if n <= layout.PROGRAM_TOKENS else 1
            yield from ((at, min(at + together, end)) for at in range(first, max(end, first + 1), together))
            first = end + 1

    def _exchange(self, step: np.ndarray, values: np.ndarray, batch: Batch) -> None:
        """Run an exchange between ranks, from one value of the program to another."""
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
    """Return (B, SEQ_WIDTH) int64 words: page table, length, and numbers of new and wanted tokens per sequence."""
    descriptor = np.empty((len(spans), layout.SEQ_WIDTH), dtype=np.int64)
    descriptor[:, : layout.SEQ_WANTED + 1] = [
        (address(span.pages), span.length, n_new, n_wanted)
        for span, n_new, n_wanted in zip(spans, lengths, wanted, strict=True)
    ]
    return descriptor


def parts_of(spans: Sequence[KVSpan], counts: Sequence[int]) -> int:
    """Return the number of partial results per head of attention: one for each query and block of keys.

    With more than SMALL_BATCH queries there are no partial results, because each block's result is merged at once.
    """
    if sum(counts) > layout.SMALL_BATCH:
        return 0
    return sum(n * -(-span.length // layout.BLOCK) for span, n in zip(spans, counts, strict=True))
