"""The memory that the ranks have free for keys and values when each has loaded its share of the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mlx_engine.cache.size import pool_nbytes
from mlx_engine.distributed.agreement import gather_values
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.split import this_computer
from mlx_engine.machine.memory import available_memory
from mlx_engine.models.decoder import Decoder


class Room(NamedTuple):
    """What a rank has.

    Attributes:
        computer: the name of its computer.
        free: bytes of memory that this computer has free.
        kv: bytes of keys and values of its layers or heads, for one whole context.
    """

    computer: str
    free: int
    kv: int


def rooms(group: Group, model: Decoder) -> list[Room]:
    """Return what each rank has; `model` is this rank's share. Every rank calls it."""
    kv = pool_nbytes(model.kv_layers, int(model.config.context_length), 1)
    return [Room(*of) for of in gather_values(group, [this_computer(), available_memory(), kv])]


def least_room(ranks: Sequence[Room], kv: int) -> tuple[int, int]:
    """Return how many bytes of keys and values fit into the free memory of every rank, and the rank that limits them.

    Ranks on one computer share its memory.

    Args:
        ranks: what each rank has.
        kv: bytes of keys and values of the pools that are counted, for one whole context; a rank has its part.
    """
    together = Counter(of.computer for of in ranks)
    fits = [(of.free // together[of.computer] * kv // of.kv, rank) for rank, of in enumerate(ranks) if of.kv]
    return min(fits, default=(min(of.free for of in ranks), 0))
