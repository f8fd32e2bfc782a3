"""`Parameters` prepares the tensors of a checkpoint for a backend, quantised if requested."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.experts import ExpertLinear
from mlx_engine.backends.parameters import Array, LayerNorm, Linear, Norm, RMSNorm
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.machine.memory import map_small_pages, release, release_rows
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.adapters import Adapters
from mlx_engine.weights.conversion import Conversion, Converted
from mlx_engine.weights.plan import Tensor
from mlx_engine.weights.stage import OwnSlices, RemoteWeight, Stage, is_elsewhere

# The suffix in the names of experts' linear layers, such as "blk.0.ffn_up_exps".
EXPERTS = "_exps"
# Called with (number of prepared tensors, number of all tensors) while a model is built.
Progress = Callable[[int, int], None]


class Parameters:
    """Prepare each tensor for a backend on its first use.

    A tied head shares the array of the embedding table, unless the head is converted or the table stays in the file.
    Weights that only other pipeline stages read are placeholders (`RemoteWeight`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, Tensor],
        backend: Backend,
        *,
        conversion: Conversion | None = None,
        progress: Progress | None = None,
        stage: Stage | None = None,
        slices: OwnSlices | None = None,
        adapters: Adapters | None = None,
        held_share: float = 1.0,
    ) -> None:
        """Make parameters of all tensors of a checkpoint, or only of the parts that `stage` or `slices` select.

        `held_share` is the fraction of each layer's experts that is in memory at the same time.
        """
        self._checkpoint, self._tensors, self._backend = checkpoint, tensors, backend
        self._conversion, self._progress = conversion or Conversion(), progress
        self.stage, self._slices, self.adapters = stage, slices, adapters
        self._held_share = held_share
        self._n_read = sum(self._reads(name) for name in tensors)
        self._prepared: dict[tuple[str, str], Array] = {}
        self._seen: set[str] = set()
        self._rows: list[tuple[str, str, str]] = []
        self._nbytes: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def converted(self) -> Converted:
        """The report on the linear layers that have been prepared so far."""
        return Converted.of(self._conversion, self._rows, self._nbytes)

    def table(self, name: str) -> Array | Weight:
        """Return an embedding table (V, D), in its stored type.

        The table stays in the mapped file if `Backend.embeds_stored` is true, or if this rank (process) does not hold
        the whole head.
        """
        weight = self._stored(f"{name}.weight")
        if is_elsewhere(weight):
            return cast(Array, weight)
        has_head = self._slices is None and (self.stage is None or self.stage.is_last)
        if has_head and not self._backend.embeds_stored(weight):
            return self._prepare(f"{name}.weight", weight)
        self._nbytes[weight.type.name] += weight.nbytes
        self._done(f"{name}.weight")
        if type(weight) is not Weight:  # the `data` of a subclass is computed, so it is no view of the file
            return weight
        return TableInFile(weight.name, weight.shape, weight.type, weight.data)

    def linear(self, name: str) -> Linear:
        """Return a linear layer: `name.weight`, converted as `Conversion` says, and `name.bias` if it exists."""
        stored = self._own(f"{name}.weight")
        weight = self._prepare(f"{name}.weight", stored.as_type(self._reported_type(name, stored)), stored)
        lora = None if self.adapters is None else self.adapters.low_rank(name, self._backend)
        return Linear(name, weight, self._bias(name), self._is_partial(name), lora)

    def first_rows(self, name: str, n: int) -> Linear:
        """Return a linear layer, without bias, with the first n rows of `name.weight`, converted as in `linear`."""
        stored = self._stored(f"{name}.weight")
        return Linear(name, self._backend.prepare(stored.cut(0, [(0, n)]).as_type(self._type(name, stored)[0])))

    def expert_linear(self, name: str, n: int) -> ExpertLinear:
        """Return a linear layer of n experts, whose matrices are `name.0.weight`, `name.1.weight` and so on."""
        n_slots = int(n * self._held_share) if name.endswith(EXPERTS) else n
        if n_slots < n:
            return self._some_experts(name, n, n_slots)
        made = [self.linear(f"{name}.{e}") for e in range(n)]
        first = f"{name}.0.weight"
        shape = self._tensors[first].shape if self._slices is None else self._slices.shape(first)
        if is_elsewhere(made[0].weight):
            return ExpertLinear(name, made[0].weight, (shape[0], shape[1]), 0, n)
        nbytes = sum(nbytes_of(linear.weight) for linear in made)
        # Drop the references to the single matrices: if `stack` copies them into one array, their memory can be freed.
        self._prepared = {key: array for key, array in self._prepared.items() if not key[0].startswith(f"{name}.")}
        weights = self._backend.stack(made)
        return ExpertLinear(name, weights, (shape[0], shape[1]), nbytes, n, self._is_partial(name))

    def _some_experts(self, name: str, n: int, n_slots: int) -> ExpertLinear:
        def read(e: int) -> Linear:
            part = f"{name}.{e}"
            stored = self._own(f"{part}.weight")
            weight = self._backend.prepare(stored.as_type(self._type(part, stored)[0]))
            if type(stored) is Weight:  # only then `data` is a view of the file, whose memory pages can be released
                release(stored.data, weight)
            bias = f"{part}.bias"
            return Linear(part, weight, self._backend.prepare(self._own(bias)) if bias in self else None)

        for part in (f"{name}.{e}" for e in range(n)):
            stored = self._own(f"{part}.weight")
            type_ = self._reported_type(part, stored)
            self._nbytes[type_.name] += type_.bytes_for(math.prod(stored.shape))
            for tensor in (f"{part}.weight", f"{part}.bias"):
                if tensor in self:
                    self._done(tensor)
        weights = self._backend.stack_some(read, n, n_slots)
        shape = self._tensors[f"{name}.0.weight"].shape
        return ExpertLinear(name, weights, (shape[0], shape[1]), weights.nbytes, n)

    def _type(self, name: str, stored: Weight) -> tuple[GGMLType, str]:
        """Return a linear layer's type after loading, and the reason if it is not converted (`Conversion.type_of`)."""
        return self._conversion.type_of(name, self._tensors[f"{name}.weight"].shape, stored.type)

    def _reported_type(self, name: str, stored: Weight) -> GGMLType:
        """Return the type from `_type`, and add a row to the report `converted`."""
        type_, reason = self._type(name, stored)
        if not is_elsewhere(stored):
            self._rows.append((name, "" if type_ == stored.type else type_.name.lower(), reason))
        return type_

    def router(self, name: str) -> Linear:
        """Return a router. It is never quantised, because rounding errors could change the chosen experts."""
        return Linear(name, self._vector(f"{name}.weight"), self._bias(name))

    def row(self, name: str) -> Linear:
        """Return a linear layer with one output. Its `name.weight` is stored as a vector, and is never converted."""
        stored = self._own(f"{name}.weight")
        if is_elsewhere(stored):
            return Linear(name, cast(Array, stored))
        matrix = Weight(stored.name, (1, *stored.shape), stored.type, stored.data)
        return Linear(name, self._prepare(f"{name}.weight", matrix))

    def vector(self, name: str, part: str = "weight") -> Array:
        """Return the vector `name.{part}`, such as the sinks of attention."""
        return self._vector(f"{name}.{part}")

    def constant(self, name: str, n: int, value: float) -> Array:
        """Return a vector of n values that all equal `value`."""
        return self._packed(name, np.full(n, value, dtype=np.float32))

    def _packed(self, name: str, values: NDArray[np.float32]) -> Array:
        return self._backend.prepare(Weight.pack(name, values, F32))

    def rms_norm(self, name: str, eps: float, times: float = 1.0) -> RMSNorm:
        """Return an RMS norm with the weight `name.weight` multiplied by `times`."""
        if times == 1:
            return RMSNorm(name, self._vector(f"{name}.weight"), eps)
        return RMSNorm(name, self._packed(f"{name}.weight", self.values(name) * np.float32(times)), eps)

    def plain_norm(self, name: str, n: int, eps: float) -> RMSNorm:
        """Return an RMS norm over n values; all its weights are 1."""
        return RMSNorm(name, self.constant(f"{name}.weight", n, 1.0), eps)

    def plain_layer_norm(self, name: str, n: int, eps: float) -> LayerNorm:
        """Return a layer norm over n values; all its weights are 1, and its biases 0."""
        return LayerNorm(name, self.constant(f"{name}.weight", n, 1.0), self.constant(f"{name}.bias", n, 0.0), eps)

    def layer_norm(self, name: str, eps: float, times: float = 1.0) -> LayerNorm:
        """Return a layer norm with weight and bias multiplied by `times`; without `name.bias`, the bias is 0."""
        if times == 1 and f"{name}.bias" in self:
            return LayerNorm(name, self._vector(f"{name}.weight"), self._vector(f"{name}.bias"), eps)
        weight = self.values(name) * np.float32(times)
        bias = self.values(name, "bias") * np.float32(times) if f"{name}.bias" in self else np.zeros_like(weight)
        return LayerNorm(name, self._packed(f"{name}.weight", weight), self._packed(f"{name}.bias", bias), eps)

    def norm(self, name: str, eps: float, times: float = 1.0, *, is_layer_norm: bool = False) -> Norm:
        """Return `layer_norm` if `is_layer_norm` is true or `name.bias` exists, otherwise `rms_norm`."""
        of_kind = self.layer_norm if is_layer_norm or f"{name}.bias" in self else self.rms_norm
        return of_kind(name, eps, times)

    def array(self, name: str, *, transposed: bool = False, times: NDArray[np.float32] | None = None) -> Array:
        """Return the tensor `name` as the backend's float32 array, for operations other than matrix products.

        If `times` is given, row i of the stored matrix is multiplied by `times[i]`.
        """
        values = self._own(name).dequantize()
        if times is not None:
            values = values * times[:, None]
        self._done(name)
        return self._backend.array(np.ascontiguousarray(values.T if transposed else values))

    def values(self, name: str, part: str = "weight") -> NDArray[np.float32]:
        """Return the values of `name.{part}` in float32, for computations during loading."""
        values = self._stored(f"{name}.{part}").dequantize()
        self._done(f"{name}.{part}")
        return values

    def size(self, name: str) -> int:
        """Return the number of rows of the whole tensor `name.weight`, even if this rank holds only a slice."""
        return self._tensors[f"{name}.weight"].shape[0]

    def layers(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Return the layers with this rank's numbers of heads and channels in place of the model's."""
        return layers if self._slices is None else self._slices.layers(layers)

    def elsewhere(self, name: str) -> Array:
        """Return a placeholder for `name.weight`, which this process does not use."""
        return cast(Array, RemoteWeight(f"{name}.weight", self._tensors[f"{name}.weight"].shape))

    def _reads(self, name: str) -> bool:
        return self.stage is None or self.stage.reads(name, is_tied="output.weight" not in self._tensors)

    def _stored(self, name: str) -> Weight:
        return self._read(name) if self._reads(name) else cast(Weight, RemoteWeight(name, self._tensors[name].shape))

    def _read(self, name: str) -> Weight:
        return self._tensors[name].weight(self._checkpoint)

    def _own(self, name: str) -> Weight:
        """Return this rank's part of a tensor."""
        stored = self._stored(name)
        if self._slices is None:
            return stored
        if type(stored) is Weight:  # only then `data` is a view of the file
            map_small_pages(stored.data)
        own = self._slices.own(name, stored)
        if type(own) is Weight and type(stored) is Weight:
            release(stored.data, own)
        return own

    def _vector(self, name: str) -> Array:
        return self._prepare(name, self._own(name))

    def _bias(self, name: str) -> Array | None:
        here = f"{name}.bias" in self and (self._slices is None or self._slices.has(f"{name}.bias"))
        return self._vector(f"{name}.bias") if here else None

    def _is_partial(self, name: str) -> bool:
        return self._slices is not None and self._slices.is_partial(name)

    def _prepare(self, name: str, weight: Weight, source: Weight | None = None) -> Array:
        """Prepare a weight once for each type. So a tied head shares the table's array if both have the same type.

        `source` is the weight before its conversion, if it was converted.
        """
        if is_elsewhere(weight):
            return cast(Array, weight)
        key = (name, weight.type.name)
        if key not in self._prepared:
            self._prepared[key] = self._backend.prepare(weight)
            if type(source or weight) is Weight:  # only then `data` is a view of the file
                release((source or weight).data, self._prepared[key])
            self._nbytes[weight.type.name] += weight.nbytes
            self._done(name)
        return self._prepared[key]

    def _done(self, name: str) -> None:
        """Call `progress` after a tensor has been prepared. If an embedding table is also the head, count it once."""
        is_new = name not in self._seen and self._reads(name)
        self._seen.add(name)
        if is_new and self._progress is not None:
            self._progress(len(self._seen), self._n_read)


@dataclass(frozen=True, eq=False)
class TableInFile(Weight):
    """An embedding table that stays in its memory-mapped file, because a pass reads only a few of its rows.

    The memory pages of these rows are released after each read; otherwise more and more of the table would become
    resident. If the head also uses some of these pages, they are mapped again in the next pass.
    """

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return `Weight.rows`, and release the memory pages that have these rows."""
        found = super().rows(ids)
        release_rows(self.data, map(int, ids), self.type.bytes_for(self.shape[1]))
        return found
