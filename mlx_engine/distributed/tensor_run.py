"""Runs with tensor parallelism: rank 0 decides on each pass, and all ranks run it, each with its slices of the tensors.

Rank 0 tells the others of a pass by a message from rank to rank (`mirror.py`). All ranks then make the same exchanges
in the same order. Messages and exchanges share connections and have no names, so every rank ends a pass before the next
message is sent, also on lazy backends.
"""

from __future__ import annotations

from collections.abc import Callable

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import END, SharedModel, messages, nothing
from mlx_engine.distributed.mirror import Message, Replica
from mlx_engine.distributed.search import FOUND, Search
from mlx_engine.models.decoder import Decoder


def follow_tensor(model: Decoder, group: Group, sleep: Callable[[], None] = nothing) -> None:
    """Run this rank's slices of every pass that rank 0 begins, until rank 0 ends the run.

    Args:
        model: the model with this rank's slices, on a backend with the group.
        group: the ranks.
        sleep: waits until rank 0 has work again.
    """
    replica, search = Replica(model.backend, model.kv_layers), Search(model, group)
    for message in messages(group, sleep):
        if END in message:
            break
        if FOUND in message:
            search.end()
            continue
        with model.backend.session():
            _run(search.model_of(message), replica, message)
    group.close()


def _run(model: Decoder, replica: Replica, message: Message) -> Array | None:
    """Run a pass to its end, and return logits (R, V), or None if none are wanted."""
    batch = replica.apply(message)
    batch.best = message["best"]
    logits = model.forward(batch)
    if logits is not None:
        model.backend.note("output", logits)
    model.backend.wait(batch.stores.arrays if logits is None else logits)
    return logits


class TensorParallel(SharedModel):
    """A model whose tensors several ranks share. All ranks run each pass together, so one may be under way."""

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        super().__init__(model, group, wake)
        self._replica = Replica(model.backend, model.kv_layers)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer keeps of a sequence on this rank."""
        return self._model.kv_layers

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        with self.whole_pass():
            message = {**self.message(batch), "best": batch.best}
            self.tell(message)
            logits = _run(self._search.model_of(message), self._replica, message)
        return None if logits is None else lambda: logits
