"""The common part of pipelines and tensor parallelism: rank 0 leads, and the other ranks follow its messages.

Rank 0 sends a message for each pass, a message when there is no work, and a last one at the end of the run. The other
ranks forward each message around the ring. If logits are not finite, all ranks search for the first value that is not
finite (`FaultSearch`). Each rank stores its part of the keys and values; the rank on which the fewest tokens fit limits
the KV pool (`least_capacity`).
"""

from __future__ import annotations

import copy
import platform
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.observed import tapped
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer, KVPool
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.distributed.group import Group, gather_values
from mlx_engine.distributed.messages import BatchMessages, Message, receive_message, send_message
from mlx_engine.errors import DistributedError, ModelError
from mlx_engine.machine.memory import available_memory
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import COUNTED
from mlx_engine.weights.model import FirstFault, Model

# Keys of messages without a pass. After END, the run ends; after REST, ranks sleep until the next message.
END, REST = "end", "rest"


def nothing() -> None:
    """Do nothing. Ranks that never sleep use this as `sleep`."""


def messages(group: Group, sleep: Callable[[], None], search: FaultSearch) -> Iterator[Message]:
    """Yield rank 0's messages about passes, and at last its message with END. Forward all messages to the next rank.

    After a message with the key REST, call `sleep`, which waits until rank 0 has work again. After a message with the
    key FOUND, end this rank's part of `search`, the search for the first value that is not finite.
    """
    while True:
        message = receive_message(group, group.previous)
        if group.next:
            send_message(group, message, group.next)
        if REST in message:
            sleep()
        elif FOUND in message:
            search.end()
        else:
            yield message
            if END in message:
                return


class SharedModel(Model):
    """A model that all ranks run together. Rank 0 uses it like a model in one process.

    Attributes:
        config, backend, program: those of rank 0's part of the model.
        is_broken: whether a pass failed or was interrupted on this rank.
        free: the free memory of each rank, measured after loading.
    """

    is_shared = True

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None) -> None:
        """Wrap `model`, rank 0's part. `wake` wakes the other ranks after `idle`; None if they never sleep."""
        self._model, self._group, self._wake, self._messages = model, group, wake, BatchMessages()
        self.config: Any = model.config
        self.backend, self.program = model.backend, model.program
        self._rests = self.is_broken = self._is_searching = False
        self._search = FaultSearch(model, group)
        self.free: Sequence[FreeMemory] = ()

    @property
    @abstractmethod
    def kv_layers(self) -> list[CacheLayer]:
        """The cache of each layer: in a pipeline, of all ranks' layers; with tensor parallelism, of rank 0's slices."""

    @abstractmethod
    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        """Begin a forward pass. Return None if no token is wanted.

        Otherwise, return a function that waits for the logits (R, V) of the R wanted tokens.

        Raises:
            DistributedError: this pass failed, or an earlier one failed or was interrupted.
        """

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the R wanted tokens, or None if no token is wanted."""
        logits = self.submit(batch)
        return None if logits is None else logits()

    def forward_hidden(self, batch: Batch) -> Array | None:
        """Raise ModelError: ranks exchange logits, not hidden states."""
        raise ModelError("embeddings: expected a model in one process, found ranks; load the model without --shard")

    def kv_capacity(self) -> tuple[int, int | None]:
        """Return the bytes of keys and values that fit on all ranks, and the limiting rank (`least_capacity`).

        Before `free` has been measured, return the free memory of rank 0, and 0 as the rank.
        """
        if not self.free:
            return available_memory(), 0
        return least_capacity(self.free, pool_nbytes(self.kv_layers, int(self.config.context_length), 1))

    def first_fault(self, run: Callable[[Model], object]) -> FirstFault | None:
        """Call `run`; return the first value (array) with NaN or infinities in its passes, or None if all are finite.

        All ranks search their parts of the passes.
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
        """Wait for all submitted passes."""

    def message(self, batch: Batch) -> Message:
        """Return the message of a pass."""
        message = self._messages.message(batch)
        return {**message, SEARCH: True} if self._is_searching else message

    def idle(self) -> None:
        """Tell the other ranks to sleep until the next message, because there is no work."""
        if self._wake is not None and not self._rests:
            self.tell({REST: True})
            self._rests = True

    def end(self, *, timeline: bool = False) -> list[list[Span]]:
        """End the run of the other ranks. With `timeline`, a pipeline returns each rank's spans.

        Otherwise, return []. Tensor parallelism has no spans, because all ranks compute a pass at the same time.
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
        """Return a context for rank 0's part of a pass. If the pass fails or is interrupted, no other pass can begin.

        Raises:
            DistributedError: this pass failed, or an earlier one failed or was interrupted.
        """
        self.check_unbroken()
        self.is_broken = True
        try:
            yield
        except DistributedError:
            raise
        except Exception as error:
            raise _incomplete(f"a forward pass ended with {type(error).__name__}: {error}") from error
        self.is_broken = False

    def check_unbroken(self) -> None:
        """Raise DistributedError if a pass failed or was interrupted on this rank: other ranks wait in that pass."""
        if self.is_broken:
            raise _incomplete("a forward pass was interrupted")

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens; `options` are arguments of `KVPool`."""
        return self._messages.pool(self.kv_layers, n_tokens, **options)


def _incomplete(found: str) -> DistributedError:
    return DistributedError(found, where="rank 0", found=found, hint="start all ranks again")


# ---- the first value that is not finite ----

# SEARCH is a key of the message of a pass that belongs to a search. FOUND is the key of the message that ends a search.
SEARCH, FOUND = "search", "found"


class FaultSearch:
    """One rank's part of the searches for the first value that is not finite; `model` is its share of the model."""

    def __init__(self, model: Decoder, group: Group) -> None:
        self._model, self._group = model, group
        self._traced: Decoder | None = None
        self._n_passes = self._n_values = 0
        # This rank's first value that is not finite: its place (number of the pass, index of the rank's first layer,
        # number of the value), its name, and the three counts of `FirstFault`.
        self._first: tuple[list[int], str, list[int]] | None = None

    def model_of(self, message: Message) -> Decoder:
        """Return this rank's part of the model, to run the pass of a message.

        In a search, return a copy that runs blocks as primitives, and calls `check` with each intermediate value.
        """
        if SEARCH not in message:
            return self._model
        if self._traced is None:
            self._traced = copy.copy(self._model)
            self._traced.run_on(tapped(self._model.backend, self.check))
        self._n_passes += 1
        return self._traced

    def check(self, name: str, x: Array) -> None:
        """Record the array `x` if it has NaN or infinities and is this rank's first such array in the search."""
        self._n_values += 1
        if self._first is not None:
            return
        values = self._model.backend.host(x)
        n_bad = int((~np.isfinite(values)).sum())
        if n_bad:
            place = [self._n_passes, self._model.stage.first, self._n_values]
            self._first = place, self._counted(name), [int(np.isnan(values).sum()), n_bad, int(values.size)]

    def end(self) -> FirstFault | None:
        """End the search; return the first value that is not finite on any rank. All ranks must call this method."""
        found: list[Any] = gather_values(self._group, self._first)
        self._traced, self._first, self._n_passes, self._n_values = None, None, 0, 0
        faults = [(place, rank, name, counts) for rank, of in enumerate(found) if of for place, name, counts in [of]]
        if not faults:
            return None
        place, rank, name, counts = min(faults)
        # With tensor parallelism, several ranks may report the same value, such as a sum over ranks. Then name no rank.
        is_on_one_rank = [of for of, *_ in faults].count(place) == 1
        return FirstFault(name, rank if is_on_one_rank else None, *counts)

    def _counted(self, name: str) -> str:
        """Return the name of a value with the layer's index in the whole model.

        If a name ends with an item of `COUNTED`, its index counts from this rank's first layer, `stage.first`.
        """
        block, _, rest = name.partition(".")
        index, _, what = rest.partition(".")
        return f"{block}.{int(index) + self._model.stage.first}.{what}" if what in COUNTED else name


# ---- memory ----


class FreeMemory(NamedTuple):
    """The memory of a rank.

    Attributes:
        computer: the rank's `this_computer()`.
        free: bytes of free memory of this computer.
        kv: bytes of keys and values of one sequence of `context_length` tokens, in this rank's layers or heads.
    """

    computer: str
    free: int
    kv: int


def free_memory(group: Group, model: Decoder) -> list[FreeMemory]:
    """Return the memory of each rank; `model` is this rank's part of the model. All ranks must call this function."""
    kv = pool_nbytes(model.kv_layers, int(model.config.context_length), 1)
    return [FreeMemory(*of) for of in gather_values(group, [this_computer(), available_memory(), kv])]


def least_capacity(ranks: Sequence[FreeMemory], kv: int) -> tuple[int, int]:
    """Return the size of the largest KV pool that fits into the free memory of all ranks, and the rank that limits it.

    The size is in bytes, counted for the layers in `SharedModel.kv_layers`. In these layers, one sequence of
    `context_length` tokens takes `kv` bytes. Each rank on a computer gets an equal share of the computer's memory. If
    no rank has keys and values, return the smallest free memory, and 0 as the rank.
    """
    together = Counter(of.computer for of in ranks)
    fits = [(of.free // together[of.computer] * kv // of.kv, rank) for rank, of in enumerate(ranks) if of.kv]
    return min(fits, default=(min(of.free for of in ranks), 0))


def this_computer() -> str:
    """Return a name of this computer that is unique among the computers of a run."""
    return f"{platform.node()} {uuid.getnode()}"


# ---- when each rank computed ----

# When a rank has recorded 2 * KEPT_SPANS spans (`Span`), it drops the older half of them.
KEPT_SPANS = 4096
# Of a `drawing`: the number of characters per rank, and how many of the latest passes it shows.
WIDTH, LATEST = 96, 12
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
IDLE = "."


class Span(NamedTuple):
    """A rank's part of a pass: which pass (from 0), how many tokens, and the times of its start and end, in seconds.

    Each rank uses its own clock, so a drawing of several machines is only as accurate as these clocks.
    """

    number: int
    n_rows: int
    began: float
    ended: float


def drawing(ranks: Sequence[Sequence[Span]], latest: int = LATEST) -> list[str]:
    """Draw the last `latest` passes: return a title, and a line for each rank; [] if a rank has no spans.

    A line has the rank, then WIDTH characters, one per interval of time: if the rank computed a pass in the interval,
    the last base-36 digit of the number of the pass, otherwise a dot. The line ends with the share of the time in which
    the rank computed.
    """
    if not ranks or not all(ranks):
        return []
    first = max(0, ranks[-1][-1].number + 1 - latest)
    shown = [[span for span in spans if span.number >= first] for spans in ranks]
    start, end = min(spans[0].began for spans in shown), max(spans[-1].ended for spans in shown)
    scale, lines = WIDTH / max(end - start, 1e-9), [f"passes from {first} on, {(end - start) * 1e3:.1f} ms:"]
    for rank, spans in enumerate(shown):
        cells = [IDLE] * WIDTH
        for span in spans:
            left = min(WIDTH - 1, int((span.began - start) * scale))
            right = max(left + 1, min(WIDTH, round((span.ended - start) * scale)))
            cells[left:right] = DIGITS[span.number % len(DIGITS)] * (right - left)
        lines.append(f"rank {rank} {''.join(cells)} {busy(spans, start, end):.0%}")
    return lines


def busy(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the share of the time from start to end in which a rank computed."""
    return sum(span.ended - span.began for span in spans) / max(end - start, 1e-9)
