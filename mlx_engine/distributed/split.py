"""The split of a pipeline: which layers each rank runs, by the bytes of layers and the speed and memory of machines.

The bytes of a layer are its weights, and the keys and values of one sequence: a rank holds both, and each pass reads
both.
"""

from __future__ import annotations

import math
import platform
import time
import uuid
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache.size import pool_nbytes
from mlx_engine.distributed.plan import ModelParts, balanced, held
from mlx_engine.errors import NotEnoughMemoryError, OptionError, shown
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.stage import Stage

OPTION = "--split"
# The sides of the matrix, 32 MiB in float32, whose product with one row measures a machine. It is repeated for some
# seconds, and a few times at least. The median counts: of ranks that share a machine, the last one to measure is alone
# for some repetitions.
N_OUTPUTS, N_INPUTS, SECONDS, REPETITIONS = 2048, 4096, 0.2, 3
# Speeds are rounded to powers of the root of 2, so that equal machines get equal shares in every run.
STEP = 0.5
# Tokens in the cache for which ranks are balanced. A split for an empty cache is slower at depth, because the head has
# no keys and values: those of 4,096 tokens of Qwen3 0.6B are twice the weights of a layer. With 1,024 tokens, two ranks
# are 1.8 times as fast as one by their bytes, both with an empty cache and with 4,096 tokens in it.
CONTEXT = 1024


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
    if not sound:
        message = f"{OPTION}: {shown(text)} is no list of layers of each rank, such as 20,8"
        raise OptionError(message, option=OPTION, found=text)
    return tuple(map(int, parts))


def stages_of(counts: Sequence[int], size: int, config: Any) -> list[Stage]:
    """Return the stage of each rank, by the numbers of their layers.

    Raises:
        OptionError: there are more or fewer ranks or layers, or layers are cut from those whose keys they share.
    """
    n_layers, text = int(config.n_layers), ",".join(map(str, counts))
    if len(counts) != size or sum(counts) != n_layers:
        message = f"{OPTION}: {text} must be {size} numbers, one for each rank, that add up to {n_layers} layers"
        raise OptionError(message, option=OPTION, found=text)
    ends = np.cumsum(counts).tolist()
    latest = latest_cut(config)
    for end in ends[:-1]:
        if end > latest:
            raise OptionError(
                f"{OPTION}: layers {latest} to {n_layers - 1} must be on one rank, because the last of them share the "
                f"keys and values of the first; {text} cuts before layer {end}",
                option=OPTION,
                found=text,
            )
    return [Stage(first, end, n_layers) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def latest_cut(config: Any) -> int:
    """Return the last layer before which a model may be cut: later layers share keys and values of this one."""
    n_layers, shares = int(config.n_layers), getattr(config, "shares", None)
    owners = [] if shares is None else [shares(i) for i in range(n_layers)]
    return min((owner for owner in owners if owner is not None), default=n_layers)


def layer_bytes(model: ModelParts, n_tokens: int) -> tuple[list[int], int]:
    """Return the bytes of each layer with keys and values of `n_tokens` tokens, and the bytes of the head."""
    caches = [0 if part.kept is None else pool_nbytes([part.kept], n_tokens) for part in model.layers]
    return [held([part]) + nbytes for part, nbytes in zip(model.layers, caches, strict=True)], held([model.head])


def best_split(layers: Sequence[int], head: int, machines: Sequence[Machine], cuts: Collection[int]) -> list[int]:
    """Return the number of layers of each rank for which the slowest rank is fastest; of equal ones the most even.

    A rank takes the time of its layers' bytes; the last one also that of the head. Embedding tables stay in the file.

    Args:
        layers: bytes of each layer.
        head: bytes of the head.
        machines: speed and memory of each rank.
        cuts: the indices of layers that may be the first of a rank.

    Raises:
        NotEnoughMemoryError: no split fits into the memory of the ranks.
        OptionError: there are more ranks than layers that can be cut apart.
    """
    n, size, most = len(layers), len(machines), len(cuts) + 1
    if size > most:
        message = f"the {n} layers of the model can be cut for at most {most} ranks, not for {size}"
        raise OptionError(message, option=OPTION, found=size)
    sums = list(accumulate(layers, initial=0))
    sums[-1] += head
    fastest = max(machine.speed for machine in machines)
    speeds = [2.0 ** (STEP * round(math.log2(machine.speed / fastest) / STEP)) for machine in machines]

    def time_of(rank: int, first: int, end: int) -> float:
        nbytes = sums[end] - sums[first]
        return nbytes / speeds[rank] if nbytes <= machines[rank].memory else math.inf

    found = balanced(n, size, cuts, time_of)
    if found is None:
        free = ", ".join(f"{machine.memory / 2**30:.1f}" for machine in machines)
        raise NotEnoughMemoryError(
            where=OPTION, needed=f"{sums[-1] / 2**30:.1f} GiB of memory in a contiguous split",
            found=f"{free} GiB on the ranks", hint="add a machine, or convert the model to a smaller type",
        )  # fmt: skip
    return found


def machines_of(measured: Sequence[tuple[str, float, int]]) -> list[Machine]:
    """Return what each rank can do, from the computer, the speed and the free memory that each rank has measured.

    Ranks on one computer get their mean speed, because they disturb each other's measurement, and an equal part of the
    memory.
    """
    made = []
    for name, _, memory in measured:
        speeds = [speed for of, speed, _ in measured if of == name]
        made.append(Machine(sum(speeds) / len(speeds), memory // len(speeds)))
    return made


def this_computer() -> str:
    """Return a name that no other computer of a run has."""
    return f"{platform.node()} {uuid.getnode()}"


def measured_speed(backend: Backend) -> float:
    """Return the bytes of a float32 matrix that a backend multiplies with one row in a second."""
    weight = Weight.pack("speed", np.ones((N_OUTPUTS, N_INPUTS), dtype=np.float32), F32)
    ends = list[float]()
    with backend.session():
        linear, x = Linear("speed", backend.prepare(weight)), backend.array(np.ones((1, N_INPUTS), dtype=np.float32))
        began = time.perf_counter()
        while len(ends) < REPETITIONS or ends[-1] - began < SECONDS:
            backend.wait(backend.linear(x, linear))
            ends.append(time.perf_counter())
    backend.discard(linear)
    return weight.nbytes / float(np.median(np.diff([began, *ends])))
