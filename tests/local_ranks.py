"""Ranks as threads of one process, which pass arrays through queues: for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mlx_engine.distributed.group import Group
from mlx_engine.errors import DistributedError

if TYPE_CHECKING:
    from mlx_engine.distributed.group import A

T = TypeVar("T")


class LocalGroup(Group):
    """One of several ranks in one process. Made by `LocalGroup.make`."""

    def __init__(self, rank: int, queues: list[list[Queue[Any]]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues

    @staticmethod
    def make(size: int) -> list[LocalGroup]:
        """Return a group of this size, as each of its ranks sees it."""
        queues: list[list[Queue[Any]]] = [[Queue() for _ in range(size)] for _ in range(size)]
        return [LocalGroup(rank, queues) for rank in range(size)]

    def send(self, array: A, rank: int) -> None:
        if rank not in (self.next, self.previous) or rank == self.rank:
            raise ValueError(f"send: expected a neighbour of rank {self.rank} of {self.size}, found {rank}")
        self._put(array, rank)

    def receive(self, shape: Sequence[int], dtype: Any, rank: int) -> Any:
        found = self._get(rank)
        if found.shape != tuple(shape) or found.dtype != dtype:
            raise ValueError(f"receive: expected {tuple(shape)} {dtype}, found {found.shape} {found.dtype}")
        return found

    def gather(self, array: A) -> A:
        for rank in range(self.size):
            self._put(array, rank)
        found = [self._get(rank) for rank in range(self.size)]
        if isinstance(array, np.ndarray):
            return np.stack(found)
        import mlx.core as mx

        return mx.stack(found)

    def end(self) -> None:
        """End the calls of all ranks that wait for an array of this one."""
        for queue in self._queues[self.rank]:
            queue.put(None)

    def _put(self, array: Any, rank: int) -> None:
        if isinstance(array, np.ndarray):
            self._queues[self.rank][rank].put(array.copy())
            return
        import mlx.core as mx

        mx.eval(array)  # another thread cannot evaluate it
        self._queues[self.rank][rank].put(array)

    def _get(self, rank: int) -> Any:
        found = self._queues[rank][self.rank].get()
        if found is None:
            raise DistributedError(f"rank {rank} has ended", where=f"rank {self.rank}", hint="see there")
        return found


def run_ranks(size: int, run: Callable[[Group], T]) -> list[T]:
    """Run a function once for each rank, in a thread each, and return their results.

    Raises:
        BaseException: the first error of a rank, in the order of time.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run_one(group: LocalGroup) -> None:
        try:
            results[group.rank] = run(group)
        except BaseException as error:
            errors.append(error)
            group.end()

    threads = [threading.Thread(target=run_one, args=(group,)) for group in LocalGroup.make(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
