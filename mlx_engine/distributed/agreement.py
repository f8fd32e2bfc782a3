"""The agreement of all ranks before a run: the same version, files and settings, or a refusal that names the rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlx_engine.distributed.group import Group
from mlx_engine.errors import DistributedError, shown


def gather_values(group: Group, value: Any) -> list[Any]:
    """Return a value of each rank that JSON can express, in the order of the ranks. Every rank calls it."""
    data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    sizes = group.gather(np.array(data.size, dtype=np.int64)).tolist()
    padded = np.zeros(max(sizes), dtype=np.uint8)
    padded[: data.size] = data
    return [json.loads(row[:n].tobytes()) for row, n in zip(group.gather(padded), sizes, strict=True)]


def agree(group: Group, facts: Mapping[str, Any]) -> None:
    """Check that every rank has the same facts, such as the version and the digest of the files.

    Raises:
        DistributedError: a rank differs from rank 0; the error names the first such rank and fact.
    """
    first, *others = gather_values(group, facts)
    for rank, of in enumerate(others, start=1):
        for name in {**first, **of}:
            if first.get(name) != of.get(name):
                raise DistributedError(
                    f"rank {rank}",
                    f"{name} of rank 0, {shown(first.get(name))}",
                    shown(of.get(name)),
                    "start all ranks with the same version, files and options",
                )
