"""Tensor parallelism: every rank runs all layers with its slices of the matrices; sums over ranks give whole results.

All ranks run the same passes over the same batches. `models/layer.py` defines where products of several ranks
are added (`all_sum`) or concatenated (`all_columns`). A sum adds the ranks in their order, so that its bits depend on
the number of ranks and not on the batch.

Rank 0 announces each pass by a message, which is forwarded from rank to rank (`messages.py`). All ranks then make the
same exchanges in the same order. Messages and exchanges share connections and are told apart only by their order, so
every rank ends a pass before the next message is sent, also on lazy backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, DeltaNet
from mlx_engine.cache import CacheLayer
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import END, FOUND, FaultSearch, SharedModel, messages, nothing
from mlx_engine.distributed.messages import Message, StagePools
from mlx_engine.distributed.slices import Slices
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Columns, Layer, Mixer, RowNorms, SharedAttention, ShortConv
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import Planned


def sliced(planned: Planned, rank: int, size: int) -> Planned:
    """Return a planned model that loads only the slices of one rank.

    The backend of the model needs the group of the ranks (`Backend.group`).

    Raises:
        NotShardableError: a matrix cannot be cut into `size` parts.
    """
    slices = Slices.of(planned)
    slices.check(size)
    return planned._replace(slices=RankSlices(planned, slices, rank, size))


@dataclass(frozen=True)
class RankSlices:
    """The slices that one rank holds of a model's tensors; see `OwnSlices`."""

    planned: Planned
    slices: Slices
    rank: int
    size: int

    def own(self, name: str, weight: Weight) -> Weight:
        found = self.slices.ranges(name, self.rank, self.size)
        return weight if found is None else weight.cut(*found)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, found = list(self.planned.tensors[name].shape), self.slices.ranges(name, self.rank, self.size)
        if found is not None:
            axis, ranges = found
            shape[axis] = sum(last - first for first, last in ranges)
        return tuple(shape)

    def is_partial(self, linear: str) -> bool:
        return self.slices.is_partial(linear)

    def has(self, name: str) -> bool:
        return self.rank == 0 or not self.slices.is_bias_of_sum(name)

    def layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        return [self._layer(i, layer) for i, layer in enumerate(layers)]

    def _layer(self, i: int, layer: Layer) -> Layer:
        return replace(layer, mix=self._mixer(i, layer.mix))

    def _columns(self, i: int, name: str, like: str) -> Columns:
        """Return the rows of a projection that this rank uses: those that it has of `like`, with the same heads."""
        held, of = self.shape(f"blk.{i}.{name}.weight")[0], self.planned.tensors[f"blk.{i}.{name}.weight"].shape[0]
        found = self.slices.ranges(f"blk.{i}.{like}.weight", self.rank, self.size)
        ((first, last),) = ((0, of),) if found is None else found[1]
        return Columns(first, last, of, are_all_here=held == of)

    def _mixer(self, i: int, mixer: Mixer) -> Mixer:
        """Return a mixer with this rank's heads or channels, and a state of their size."""
        if isinstance(mixer, SharedAttention):
            return mixer
        if isinstance(mixer, Attention):
            norms = mixer.norms
            if isinstance(norms, RowNorms):
                columns = self._columns(i, "attn_q", "attn_q"), self._columns(i, "attn_k", "attn_v")
                norms = replace(norms, columns=columns)
            n_values = self.shape(f"{mixer.v.name}.weight")[0]
            return replace(mixer, norms=norms, n_kv_heads=n_values // mixer.head_dim)
        if isinstance(mixer, ShortConv):
            ((taps, _),) = mixer.state
            return replace(mixer, state=((taps, self.shape(f"blk.{i}.shortconv.conv.weight")[0]),))
        n_values, channels = self.shape(f"blk.{i}.ssm_a")[0], self.shape(f"blk.{i}.ssm_conv1d.weight")[0]
        rule, ((taps, _), (_, *head)) = mixer.rule, mixer.state
        n_keys = n_values * rule.n_key_heads // rule.n_value_heads
        rule = replace(rule, n_key_heads=n_keys, n_value_heads=n_values)
        return DeltaNet(mixer.projections, mixer.conv, rule, mixer.norm, ((taps, channels), (n_values, *head)))


def follow_tensor(model: Decoder, group: Group, sleep: Callable[[], None] = nothing) -> None:
    """Run this rank's slices of every pass that rank 0 begins, until rank 0 ends the run.

    Args:
        model: the model with this rank's slices, on a backend with the group.
        group: the ranks.
        sleep: waits until rank 0 has work again.
    """
    pools, search = StagePools(model.backend, model.kv_layers), FaultSearch(model, group)
    for message in messages(group, sleep):
        if END in message:
            break
        if FOUND in message:
            search.end()
            continue
        with model.backend.session():
            _run(search.model_of(message), pools, message)
    group.close()


def _run(model: Decoder, pools: StagePools, message: Message) -> Array | None:
    """Run a pass to its end, and return logits (R, V), or None if none are wanted."""
    batch = pools.apply(message)
    batch.best = message["best"]
    logits = model.forward(batch)
    if logits is not None:
        model.backend.note("output", logits)
    model.backend.wait(batch.stores.arrays if logits is None else logits)
    return logits


class TensorParallel(SharedModel):
    """A model whose tensors several ranks share. All ranks run each pass together, so only one can be in progress."""

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        super().__init__(model, group, wake)
        self._pools = StagePools(model.backend, model.kv_layers)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """The cache of each layer on this rank."""
        return self._model.kv_layers

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        with self.whole_pass():
            message = {**self.message(batch), "best": batch.best}
            self.tell(message)
            logits = _run(self._search.model_of(message), self._pools, message)
        return None if logits is None else lambda: logits
