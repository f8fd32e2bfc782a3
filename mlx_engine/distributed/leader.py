"""Rank 0 leads and the others follow: what all kinds of sharing have in common.

Rank 0 tells the next rank of each pass, of a rest and of the end, and each rank passes the message on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer, KVPool, KVSequence
from mlx_engine.cache.size import pool_nbytes
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.mirror import Message, Mirror, receive_message, send_message
from mlx_engine.distributed.room import Room, least_room
from mlx_engine.distributed.search import FOUND, SEARCH, Search
from mlx_engine.distributed.timeline import Span
from mlx_engine.errors import DistributedError
from mlx_engine.machine.memory import available_memory
from mlx_engine.models.decoder import Decoder
from mlx_engine.weights.model import FirstFault, Model

# Messages without a pass: the run ends, or nothing is to be done for a while.
END, REST = "end", "rest"


def nothing() -> None:
    """Do nothing, as a rank that never sleeps does where others wait for work."""


def messages(group: Group, sleep: Callable[[], None]) -> Iterator[Message]:
    """Yield rank 0's messages on another rank, passed on to the next one. The last message is that of the end.

    Args:
        group: the ranks.
        sleep: waits until rank 0 has work again.
    """
    while True:
        message = receive_message(group, group.previous)
        if group.next:
            send_message(group, message, group.next)
        if REST in message:
            sleep()
            continue
        yield message
        if END in message:
            return


class SharedModel(Model):
    """A model that all ranks run together, as rank 0 uses it.

    Attributes:
        config, backend, program: those of rank 0's share.
        n_stages: the number of passes that may be under way.
        is_broken: whether a pass was interrupted on this rank.
        rooms: what memory each rank has free.
    """

    is_shared = True

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None) -> None:
        """Make the model.

        Args:
            model: rank 0's share.
            group: the ranks.
            wake: wakes the other ranks after `rest`; None if they never sleep.
        """
        self._model, self._group, self._wake, self._mirror = model, group, wake, Mirror()
        self.config: Any = model.config
        self.backend, self.program = model.backend, model.program
        self._rests = self.is_broken = self._is_searching = False
        self._search = Search(model, group)
        self.rooms: Sequence[Room] = ()

    @property
    @abstractmethod
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer keeps of a sequence."""

    @abstractmethod
    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        """Begin a forward pass. Return a function that waits for its logits (R, V), or None if none are wanted.

        Raises:
            DistributedError: an earlier pass was interrupted on this rank, so that the others wait for the rest of it.
        """

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the wanted tokens, or None if there are none."""
        logits = self.submit(batch)
        return None if logits is None else logits()

    def kv_capacity(self) -> tuple[int, int | None]:
        """Return how many bytes of keys and values fit into the free memory of every rank, and the rank that limits it.

        The memory is that after loading.
        """
        if not self.rooms:
            return available_memory(), 0
        return least_room(self.rooms, pool_nbytes(self.kv_layers, int(self.config.context_length), 1))

    def first_fault(self, run: Callable[[Model], object]) -> FirstFault | None:
        """Return the first value that is not finite in the passes that `run` begins, on all ranks; None if all are.

        The ranks run these passes with every operation in its composed form.
        """
        self._is_searching = True
        try:
            run(self)
        finally:
            self._is_searching = False
        self.settle()
        self.tell({FOUND: True})
        return self._search.end()

    def settle(self) -> None:
        """Wait for all passes that have begun."""

    def message(self, batch: Batch) -> Message:
        """Return the message of a pass."""
        message = self._mirror.message(batch)
        return {**message, SEARCH: True} if self._is_searching else message

    def rest(self) -> None:
        """Have the other ranks sleep until the next pass, because there is no work."""
        if self._wake is not None and not self._rests:
            self.tell({REST: True})
            self._rests = True

    def end(self, *, timeline: bool = False) -> list[list[Span]]:
        """End the run of the other ranks. With `timeline`, return when each rank computed its part of each pass.

        Only pipelines return this: in other runs all ranks compute each pass together.
        """
        self.tell({END: ""})
        self._group.close()
        return []

    def tell(self, message: Message) -> None:
        """Send a message to the other ranks, after waking them if they sleep."""
        if self._rests and self._wake is not None:
            self._wake()
            self._rests = False
        if self._group.size > 1:
            send_message(self._group, message, self._group.next)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Run rank 0's part of a pass inside; if it is interrupted, no other pass can begin.

        Raises:
            DistributedError: the pass has failed, or an earlier one was interrupted: the other ranks wait for the rest.
        """
        self.check_unbroken()
        self.is_broken = True
        try:
            yield
        except DistributedError:
            raise
        except Exception as error:
            raise _incomplete(f"one that ended with {type(error).__name__}: {error}") from error
        self.is_broken = False

    def check_unbroken(self) -> None:
        """Check that no pass was interrupted on this rank.

        Raises:
            DistributedError: one was, so that the other ranks wait for the rest of it.
        """
        if self.is_broken:
            raise _incomplete("one that was interrupted")

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; the options are those of `KVPool`."""
        return self._mirror.pool(self.kv_layers, n_tokens, **options)

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return the empty KV cache of a sequence of at most `n_tokens` tokens, in a pool of its own."""
        return self.new_pool(n_tokens, **options).sequence()

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty KV cache for a single pass of `n_tokens` tokens."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)


def _incomplete(found: str) -> DistributedError:
    return DistributedError("rank 0", "all passes to be complete", found, "start all ranks again")
