"""Runs with tensor parallelism: rank 0 decides on each pass, and all ranks run it, each with its slices of the tensors.

Rank 0 tells the others of a pass by a message from rank to rank (`mirror.py`). All ranks then make the same exchanges
in the same order. Messages and exchanges share connections and have no names, so every rank ends a pass before the next
message is sent, also on lazy backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer, KVPool, KVSequence
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.mirror import Message, Mirror, Replica, receive_message, send_message
from mlx_engine.distributed.pipeline import END, REST
from mlx_engine.models.decoder import Decoder


def follow_tensor(model: Decoder, group: Group, sleep: Callable[[], None] = lambda: None) -> None:
    """Run this rank's slices of every pass that rank 0 begins, until rank 0 ends the run.

    Args:
        model: the model with this rank's slices, on a backend with the group.
        group: the ranks.
        sleep: waits until rank 0 has work again.
    """
    replica = Replica(model.backend, model.kv_layers)
    while True:
        message = receive_message(group, group.previous)
        if group.next:
            send_message(group, message, group.next)
        if END in message:
            return group.close()
        if REST in message:
            sleep()
            continue
        with model.backend.session():
            _run(model, replica, message)


def _run(model: Decoder, replica: Replica, message: Message) -> Array | None:
    """Run a pass to its end, and return logits (R, V), or None if none are wanted."""
    batch = replica.apply(message)
    batch.best = message["best"]
    logits = model.forward(batch)
    model.backend.wait(batch.stores.arrays if logits is None else logits)
    return logits


class TensorParallel:
    """A model whose tensors several ranks share, as rank 0 uses it.

    Attributes:
        config, backend, program: those of rank 0's slices.
        n_stages: the number of passes that may be under way, 1: all ranks run each pass together.
    """

    n_stages = 1

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        """Make the model.

        Args:
            model: the model with rank 0's slices, on a backend with the group.
            group: the ranks.
            wake: wakes the other ranks after `rest`; None if they never sleep.
        """
        self._model, self._group, self._wake, self._rests = model, group, wake, False
        self.config: Any = model.config
        self.backend, self.program = model.backend, model.program
        self._mirror, self._replica = Mirror(), Replica(model.backend, model.kv_layers)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer keeps of a sequence on this rank."""
        return self._model.kv_layers

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass on all ranks and return logits (R, V) of the wanted tokens, or None if there are none."""
        message = {**self._mirror.message(batch), "best": batch.best}
        self._tell(message)
        return _run(self._model, self._replica, message)

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        """Run a forward pass. Return a function that returns its logits (R, V), or None if none are wanted."""
        logits = self.forward(batch)
        return None if logits is None else lambda: logits

    def rest(self) -> None:
        """Have the other ranks sleep until the next pass, because there is no work."""
        if self._wake is not None and not self._rests:
            self._tell({REST: True})
            self._rests = True

    def end(self) -> None:
        """End the run of the other ranks."""
        self._tell({END: True})
        self._group.close()

    def _tell(self, message: Message) -> None:
        if self._rests and self._wake is not None:
            self._wake()
            self._rests = False
        if self._group.size > 1:
            send_message(self._group, message, self._group.next)

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; the options are those of `KVPool`."""
        return self._mirror.pool(self.kv_layers, n_tokens, **options)

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return the empty KV cache of a sequence of at most `n_tokens` tokens, in a pool of its own."""
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty KV cache for a single pass of `n_tokens` tokens."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)
