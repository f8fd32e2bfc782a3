"""The split of a pipeline: which layers each rank runs, by the bytes of layers and the speed and memory of machines."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.errors import NotEnoughMemoryError, OptionError, Words, require
from mlx_engine.models import Planned
from mlx_engine.models.stage import Stage
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight

OPTION = "--split"
# The sides of the matrix, 32 MiB in float32, whose product with one row measures a machine; and the repetitions.
N_OUTPUTS, N_INPUTS, REPETITIONS = 2048, 4096, 8
# Speeds are rounded to powers of the root of 2, so that equal machines get equal shares in every run.
STEP = 0.5


class Machine(NamedTuple):
    """What a rank can do: bytes of weights that it multiplies in a second, and bytes of memory that are free."""

    speed: float
    memory: int


def parsed(text: str) -> tuple[int, ...]:
    """Parse `20,8`, the number of layers of each rank.

    Raises:
        OptionError: the text has another form.
    """
    parts = text.split(",")
    sound = all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)
    require(sound, option=OPTION, expected="the number of layers of each rank, such as 20,8", found=text)
    return tuple(map(int, parts))


def stages_of(counts: Sequence[int], size: int, config: Any) -> list[Stage]:
    """Return the stage of each rank, by the numbers of their layers.

    Raises:
        OptionError: there are more or fewer ranks or layers, or layers are cut from those whose keys they share.
    """
    n_layers = int(config.n_layers)
    expected = f"{size} numbers, one for each rank, that add up to {n_layers} layers"
    found = Words(",".join(map(str, counts)))
    require(len(counts) == size and sum(counts) == n_layers, option=OPTION, expected=expected, found=found)
    ends = np.cumsum(counts).tolist()
    latest = latest_cut(config)
    for end in ends[:-1]:
        if end > latest:
            raise OptionError(
                option=OPTION,
                expected=f"layers {latest} to {n_layers - 1} on one rank, because the last of them share the keys and "
                "values of the first",
                found=Words(f"a cut before layer {end}"),
            )
    return [Stage(first, end, n_layers) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def latest_cut(config: Any) -> int:
    """Return the last layer before which a model may be cut: later layers share keys and values of this one."""
    n_layers, shares = int(config.n_layers), getattr(config, "shares", None)
    owners = [] if shares is None else [shares(i) for i in range(n_layers)]
    return min((owner for owner in owners if owner is not None), default=n_layers)


def layer_bytes(planned: Planned) -> tuple[list[int], int, int]:
    """Return the stored bytes of each layer's weights, of the embedding tables, and of the head."""
    n_layers = int(planned.config.n_layers)
    first, last = Stage(0, 1, n_layers + 1), Stage(n_layers, n_layers + 1, n_layers + 1)
    is_tied = "output.weight" not in planned.tensors
    layers, embedding, head = [0] * n_layers, 0, 0
    for name, tensor in planned.tensors.items():
        stored = tensor.stored(planned.checkpoint.naming)
        nbytes = planned.checkpoint.weight(stored.name).type.bytes_for(math.prod(tensor.shape))
        if name.startswith("blk."):
            layers[int(name.split(".")[1])] += nbytes
            continue
        embedding += nbytes * first.reads(name, is_tied=is_tied)
        head += nbytes * last.reads(name, is_tied=is_tied)
    return layers, embedding, head


def best_split(
    layers: Sequence[int], embedding: int, head: int, machines: Sequence[Machine], latest: int | None = None
) -> list[int]:
    """Return the number of layers of each rank for which the slowest rank is fastest; of equal ones the first.

    A rank takes the time of its layers' bytes; the last one also that of the head. The embedding table takes memory
    of the first rank, and no time.

    Args:
        layers: bytes of each layer.
        embedding: bytes of the embedding tables.
        head: bytes of the head.
        machines: speed and memory of each rank.
        latest: the last layer before which the model may be cut.

    Raises:
        NotEnoughMemoryError: no split fits into the memory of the ranks.
        OptionError: there are more ranks than layers that can be cut apart.
    """
    n, size = len(layers), len(machines)
    latest = n if latest is None else latest
    found = Words(f"{size} ranks")
    require(size <= min(n, latest + 1), option=OPTION, expected=f"at most {min(n, latest + 1)} ranks", found=found)
    sums = [0, *np.cumsum(layers).tolist()]
    fastest = max(machine.speed for machine in machines)
    speeds = [2.0 ** (STEP * round(math.log2(machine.speed / fastest) / STEP)) for machine in machines]
    # best[end]: the time of the slowest rank so far if the layers before `end` are distributed, and the ends before.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for rank, machine in enumerate(machines):
        after: dict[int, tuple[float, list[int]]] = {}
        for first, (slowest, ends) in best.items():
            is_last = rank == size - 1
            for end in [n] if is_last else range(first + 1, min(latest, n - 1) + 1):
                nbytes = sums[end] - sums[first] + head * is_last
                if end <= first or nbytes + embedding * (rank == 0) > machine.memory:
                    continue
                time_ = max(slowest, nbytes / speeds[rank])
                if end not in after or time_ < after[end][0]:
                    after[end] = time_, [*ends, end]
        best = after
    if n not in best:
        free = ", ".join(f"{machine.memory / 2**30:.1f}" for machine in machines)
        needed = (sums[-1] + embedding + head) / 2**30
        raise NotEnoughMemoryError(
            where=OPTION, needed=f"{needed:.1f} GiB of memory in a contiguous split", found=f"{free} GiB on the ranks",
            hint="add a machine, or convert the model to a smaller type",
        )  # fmt: skip
    return [end - first for first, end in itertools.pairwise([0, *best[n][1]])]


def measured_speed(backend: Backend) -> float:
    """Return the bytes of a float32 matrix that a backend multiplies with one row in a second."""
    weight = Weight.pack("speed", np.ones((N_OUTPUTS, N_INPUTS), dtype=np.float32), F32)
    seconds = math.inf
    with backend.session():
        linear, x = Linear("speed", backend.prepare(weight)), backend.array(np.ones((1, N_INPUTS), dtype=np.float32))
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            backend.wait(backend.linear(x, linear))
            seconds = min(seconds, time.perf_counter() - start)
    backend.leave_in_file(linear.weight)
    return weight.nbytes / seconds
