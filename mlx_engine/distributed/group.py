"""The ranks of one run, and the exchange of arrays between them over MLX's ring (TCP).

A rank is one process of the run; `mlx.launch` starts the ranks and numbers them from 0. The ring connects each rank
with the next one, and the last rank with rank 0; connected ranks are neighbours. Methods take NumPy arrays or MLX
arrays, and return the same kind.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mlx_engine.distributed.heartbeat import Report
from mlx_engine.errors import DistributedError

if TYPE_CHECKING:
    import mlx.core as mx

    A = TypeVar("A", np.ndarray, mx.array)

# Environment variables that `mlx.launch` sets: the path of a file with the addresses of all ranks, and
# the number of this rank.
HOSTFILE, RANK = "MLX_HOSTFILE", "MLX_RANK"


class Group(ABC):
    """The ranks of a run, as seen by one of them.

    Attributes:
        rank: the number of this process.
        size: the number of ranks.
        report: for the heartbeat: how many sends to the next rank and how many gathers have begun, and the ordinal
            number of the receive or gather that this rank waits for. Gathers of MLX arrays are lazy, and are not
            counted.
        on_loss: called when the connection to a neighbour was lost, before the error is raised.
    """

    rank: int = 0
    size: int = 1
    report = Report()
    on_loss: Callable[[], None] = staticmethod(lambda: None)

    @property
    def next(self) -> int:
        """The next rank in the ring; after the last rank comes rank 0."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """The previous rank in the ring; before rank 0 comes the last rank."""
        return (self.rank - 1) % self.size

    @abstractmethod
    def send(self, array: A, rank: int) -> None:
        """Send an array to a neighbour without waiting until it has been received. Arrays arrive in order.

        At most `size + 1` sends may be in progress; a further send waits for the oldest one.

        Raises:
            DistributedError: the connection was lost.
        """

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: Any, rank: int) -> Any:
        """Wait for the next array from a neighbour, and return it.

        The array must have been sent with this shape and type. Give a NumPy type to get a NumPy array, or an MLX type
        to get an MLX array.

        Raises:
            DistributedError: the connection was lost.
        """

    @abstractmethod
    def gather(self, array: A) -> A:
        """Return the arrays of all ranks (size, ...), in rank order. All ranks must call this with equal shapes.

        MLX arrays are gathered when the result is evaluated.

        Raises:
            DistributedError: the connection was lost.
        """

    def sum(self, array: A) -> A:
        """Return the sum over all ranks, added in the order of the ranks: `((rank 0 + rank 1) + rank 2) + ...`.

        So the bits of an element depend neither on its index nor on the other elements. With three ranks or more,
        MLX's `all_sum` adds in an order that depends on the index.
        """
        if self.size == 1:
            return array
        gathered = self.gather(array)
        total: A = gathered[0]
        for rank in range(1, self.size):
            total = total + gathered[rank]
        return total

    def close(self) -> None:  # noqa: B027
        """Wait until all sends are complete."""


class Ring(Group):
    """MLX's ring. Its calls wait in C++ without the GIL, and raise an error if a connection is lost.

    While a receive is pending, a thread of MLX polls a socket and uses a whole core. So receive only when there is
    nothing else to compute.
    """

    def __init__(self) -> None:
        """Connect to the neighbours.

        Raises:
            DistributedError: this process was not started by `mlx.launch`, or a neighbour cannot be reached.
        """
        import mlx.core as mx

        self._mx = mx
        try:
            with released():
                self._group = mx.distributed.init(strict=True, backend="ring")
        except (RuntimeError, ValueError) as error:
            message, hint = f"the ranks do not connect: {error}", "start all ranks with mlx.launch"
            raise DistributedError(message, where="ring", found=str(error), hint=hint) from error
        self.rank, self.size = self._group.rank(), self._group.size()
        # Sends have their own stream, so that two ranks may send to each other at the same time.
        self._sending, self._receiving = (mx.new_thread_unsafe_stream(mx.cpu) for _ in range(2))
        self._sent: deque[mx.array] = deque()
        self._n_received = 0

    def send(self, array: A, rank: int) -> None:
        mx = self._mx
        if len(self._sent) > self.size:
            self._done(self._sent.popleft())
        sent = mx.distributed.send(mx.array(array), rank, group=self._group, stream=self._sending)
        mx.async_eval(sent)
        self._sent.append(sent)
        self.report = self.report._replace(sent=self.report.sent + (rank == self.next))

    def receive(self, shape: Sequence[int], dtype: Any, rank: int) -> Any:
        mx, is_native = self._mx, isinstance(dtype, self._mx.Dtype)
        of = dtype if is_native else getattr(mx, np.dtype(dtype).name)
        found = mx.distributed.recv(tuple(shape), of, rank, group=self._group, stream=self._receiving)
        if rank == self.previous:
            self._n_received += 1
            self.report = self.report._replace(awaited=self._n_received, nbytes=found.nbytes)
        try:
            self._done(found)
        finally:
            self.report = self.report._replace(awaited=0)
        return found if is_native else np.array(found)

    def gather(self, array: A) -> A:
        mx = self._mx
        self.close()  # complete all sends first, because MLX may run the gather before them
        given = mx.array(array)
        found = mx.distributed.all_gather(given.reshape(-1), group=self._group, stream=self._receiving)
        found = found.reshape(self.size, *given.shape)
        if isinstance(array, np.ndarray):
            number = self.report.gathers + 1
            self.report = self.report._replace(gathers=number, awaited_gather=number, nbytes=found.nbytes)
            try:
                self._done(found)
            finally:
                self.report = self.report._replace(awaited_gather=0)
        result: A = np.array(found) if isinstance(array, np.ndarray) else found
        return result

    def close(self) -> None:
        while self._sent:
            self._done(self._sent.popleft())

    def _done(self, array: mx.array) -> mx.array:
        """Evaluate an array, which completes its send, receive or gather, and return the array."""
        try:
            self._mx.eval(array)
        except RuntimeError as error:
            self.on_loss()
            message, hint = f"lost the connection to another rank: {error}", "see what the other ranks report"
            raise DistributedError(message, where=f"rank {self.rank}", found=str(error), hint=hint) from error
        return array


def launched() -> bool:
    """Return whether `mlx.launch` has started this process as one of several."""
    path = Path(os.environ.get(HOSTFILE) or os.devnull)
    # For a single rank, `mlx.launch` writes a file with "\n" alone.
    return RANK in os.environ and path.exists() and path.stat().st_size > 1


def gather_values(group: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, sent as JSON. All ranks must call this function."""
    data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    sizes = group.gather(np.array(data.size, dtype=np.int64)).tolist()
    padded = np.zeros(max(sizes), dtype=np.uint8)
    padded[: data.size] = data
    return [json.loads(row[:n].tobytes()) for row, n in zip(group.gather(padded), sizes, strict=True)]


# Bytes of the ring's buffers: two of 8 MiB for each of two directions, in ring.cpp of MLX 0.32. They are one memory
# mapping, which begins with one more page for the header of malloc.
RING_BUFFERS = 2 * 2 * (8 << 20)
_MAPS = Path("/proc/self/maps")


@contextmanager
def released() -> Iterator[None]:
    """Return a context. On Linux, its exit releases the pages of ring buffers that were allocated in it.

    MLX's ring allocates 32 MiB of buffers per rank, filled with zeros, for MLX's `all_sum`, which `Ring` never calls.
    Releasing their pages is safe: a released page is zero again when it is next read. Pages are released only if
    exactly one new mapping has the size of the buffers, and all its bytes are zero.
    """
    before = _mappings()
    yield
    new = [(start, end) for start, end in _mappings() - before if end - start == RING_BUFFERS + mmap.PAGESIZE]
    if len(new) != 1:
        return
    first = new[0][0] + mmap.PAGESIZE
    if not np.ctypeslib.as_array((ctypes.c_uint64 * (RING_BUFFERS // 8)).from_address(first)).any():
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(RING_BUFFERS), mmap.MADV_DONTNEED)


def _mappings() -> set[tuple[int, int]]:
    """Return the address range (start, end), `end` excluded, of every private writable mapping without a file."""
    if not _MAPS.exists():
        return set()
    rows = (line.split() for line in _MAPS.read_text().splitlines())
    return {
        (int(first, 16), int(last, 16))
        for first, last in (row[0].split("-") for row in rows if row[1] == "rw-p" and len(row) == 5)
    }
