"""Groups of ranks: order of arrays and of sums, in threads, and in processes over MLX's ring."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.distributed.group import Group, Ring
from mlx_engine.errors import DistributedError
from tests import ranks
from tests.local_ranks import LocalGroup, run_ranks
from tests.patience import wait_for


class Watched(Ring):
    """A ring that keeps what its reports said while it waited: message, gather and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[int, int, int]] = []

    def _done(self, array: mx.array) -> mx.array:
        if self.report.awaited or self.report.awaited_gather:
            self.waits.append((self.report.awaited, self.report.awaited_gather, self.report.nbytes))
        return super()._done(array)


def exercise(group: Group) -> str:
    """Send around the ring, gather and sum, as every rank of a group; return the rank if all is as it should be."""
    mine = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * group.rank
    for times in range(2 * group.size):  # more than may be under way
        group.send(mine * (times + 1), group.next)
    for times in range(2 * group.size):
        got = group.receive((2, 3), np.float32, group.previous)
        expected = (mine + 10 * (group.previous - group.rank)) * (times + 1)
        assert isinstance(got, np.ndarray)
        assert (got == expected).all()
    group.send(mx.array([group.rank]), group.previous)
    assert group.receive((1,), mx.int32, group.next).tolist() == [group.next]
    assert group.gather(np.array(group.rank)).tolist() == list(range(group.size))
    assert group.gather(mx.array([[group.rank]])).tolist() == [[[rank]] for rank in range(group.size)]
    check_sum(group)
    group.close()
    return f"rank {group.rank} of {group.size}"


def check_sum(group: Group) -> None:
    """Check that a sum has the order of the ranks for each element, which shows in its last bit."""
    parts = np.random.default_rng(0).standard_normal((group.size, 1000)).astype(np.float32)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    assert (group.sum(parts[group.rank]) == expected).all()
    assert (np.array(group.sum(mx.array(parts[group.rank]))) == expected).all()
    assert group.size < 3 or (expected != parts[::-1].cumsum(axis=0, dtype=np.float32)[-1]).any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_are_ranks(size: int):
    assert run_ranks(size, exercise) == [f"rank {rank} of {size}" for rank in range(size)]


@pytest.mark.slow
def test_processes_are_ranks(tmp_path):
    for rank, (code, out, err) in enumerate(ranks.run(tmp_path, 3, ["-m", __name__])):
        printed, waits, report = out.splitlines()
        assert (code, printed, err) == (0, f"rank {rank} of 3", "")
        # Gathers of MLX arrays are lazy and not counted.
        assert waits == str([*((i, 0, 24) for i in range(1, 7)), (0, 1, 24), (0, 2, 12_000)])
        assert report == "Report(sent=6, awaited=0, gathers=2, awaited_gather=0, nbytes=12000)"


def test_a_rank_alone_sums_and_gathers_itself():
    alone, x = LocalGroup.make(1)[0], np.array([1.0, 2.0], dtype=np.float32)
    assert alone.sum(x) is x
    assert alone.gather(x).tolist() == [[1.0, 2.0]]
    assert (alone.next, alone.previous) == (0, 0)
    with pytest.raises(ValueError, match="expected a neighbour"):
        alone.send(x, 0)


def test_arrays_go_to_neighbours_alone():
    with pytest.raises(ValueError, match="expected a neighbour of rank 0 of 4, found 2"):
        LocalGroup.make(4)[0].send(np.zeros(1), 2)


def test_another_shape_than_was_sent_is_refused():
    first, second = LocalGroup.make(2)
    first.send(np.zeros(3, dtype=np.float32), 1)
    with pytest.raises(ValueError, match=r"expected \(2,\)"):
        second.receive((2,), np.float32, 0)


def test_the_error_of_a_rank_ends_those_that_wait_for_it():
    def run(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("rank 1")
        group.receive((1,), np.float32, 1)

    with pytest.raises(KeyError, match="rank 1"):
        run_ranks(3, run)


def test_a_process_alone_is_no_ring(monkeypatch):
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(DistributedError, match=r"start all ranks with mlx\.launch"):
        Ring()


def meet() -> None:
    """Wait until all ranks have come here: MLX tries for some seconds alone to connect them."""
    folder = Path(os.environ["MLX_HOSTFILE"]).parent
    (folder / f"started{os.environ['MLX_RANK']}").touch()
    wait_for(lambda: len(list(folder.glob("started*"))) == 3)


if __name__ == "__main__":
    meet()
    ring = Watched()
    print(exercise(ring))
    print(ring.waits)
    print(ring.report)
