"""Pipeline parallelism: each rank runs a range of layers of every pass, and sends hidden states to the next rank.

Rank 0 embeds the tokens and begins each pass. The last rank computes the logits and sends them to rank 0. While later
ranks run a pass, rank 0 begins further passes: for other sequences, or for the next tokens of a prompt. If all requests
of a pass sample greedily or with top-k, only the largest logits are sent to rank 0, unless all logits take fewer bytes.
Every rank runs passes in the order in which rank 0 begins them, so a pass finds the keys and values of earlier passes.
On `simd`, `parallel` and `metal`, a pass has the same bits as in one process; on `mlx`, only if its shape is the
same, too.

The split (which layers each rank runs) is chosen by the bytes of layers and by the speed and memory of machines. The
bytes of a layer are its weights, and the keys and values of one sequence, because each pass reads both.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, Linear
from mlx_engine.backends.sampling import packed, packs, unpacked
from mlx_engine.cache import CacheLayer
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.distributed.group import Group, gather_values
from mlx_engine.distributed.leader import END, KEPT_SPANS, FaultSearch, SharedModel, Span, messages, nothing
from mlx_engine.distributed.messages import Message, StagePools
from mlx_engine.distributed.plan import ModelParts, balanced, held
from mlx_engine.errors import NotEnoughMemoryError, OptionError, shown
from mlx_engine.models.decoder import Decoder
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.stage import Stage

# If the message that ends the run has this value under the key END, ranks reply with the times of passes (`Span`).
TIMELINE = "timeline"


class StageRunner:
    """Runs a rank's part of each pass, and records the times in `spans`."""

    def __init__(self, model: Decoder, group: Group, search: FaultSearch) -> None:
        self._model, self._group, self._search, self.spans = model, group, search, list[Span]()
        self._pools = StagePools(model.backend, model.kv_layers, model.stage.first)
        own = model.layers[0].input
        # A row of this rank's input has the hidden state of a token, then the per-layer inputs of this rank's layers,
        # then the per-layer inputs of all later layers. `_hidden` and `_own` are the widths of the first two parts, and
        # `_width` is the width of the whole row.
        n_inputs = own.columns[1] - own.columns[0] if own is not None else 0
        stage = model.stage
        self._hidden, self._own = int(model.config.hidden_size), (stage.end - stage.first) * n_inputs
        self._width = self._hidden + (stage.n_layers - stage.first) * n_inputs

    def run(self, message: Message) -> Array | None:
        """Run this rank's layers of a pass.

        On the last rank, return the logits (R, V) of the R wanted rows, or None if no logits are wanted. On any other
        rank, send the hidden states (T, ...) to the next rank, and return None.
        """
        model, stage = self._search.model_of(message), self._model.stage
        be = model.backend
        batch, began = self._pools.apply(message), time.time()
        if stage.is_first:
            x = be.note("embed", model.embed(batch.ids, batch.positions))
        else:
            x = be.as_activations(
                self._group.receive((len(batch.positions), self._width), np.float32, self._group.previous)
            )
            began = time.time()
        rest = None
        if self._width > self._hidden + self._own:  # layers of later ranks have per-layer inputs
            rest = be.columns(x, self._hidden + self._own, self._width)
            x = be.columns(x, 0, self._hidden + self._own)
        if stage.is_last:
            logits = self._last(model, x, batch)
            self._note(batch, began)
            return logits
        y = be.host(model.program.run(x, replace(batch, wanted=batch.lengths)))
        y = y if rest is None else np.concatenate((y, be.host(rest)), axis=1)
        self._note(batch, began)
        self._group.send(np.ascontiguousarray(y, dtype=np.float32), self._group.next)
        return None

    @staticmethod
    def _last(model: Decoder, x: Array, batch: Batch) -> Array | None:
        be, y = model.backend, model.program.run(x, batch)
        if batch.want == "none":
            be.wait(batch.stores.arrays)
            return None
        logits = be.note("output", model.head(y))
        be.wait(logits)
        return logits

    def _note(self, batch: Batch, began: float) -> None:
        """Record when this rank computed its part of a pass."""
        number = self.spans[-1].number + 1 if self.spans else 0
        self.spans.append(Span(number, len(batch.positions), began, time.time()))
        if len(self.spans) >= 2 * KEPT_SPANS:
            del self.spans[:KEPT_SPANS]


def follow(model: Decoder, group: Group, sleep: Callable[[], None] = nothing) -> None:
    """Run this rank's layers of every pass, until rank 0 ends the run. `sleep` waits until rank 0 has work again."""
    search = FaultSearch(model, group)
    runner, be = StageRunner(model, group, search), model.backend
    for message in messages(group, sleep, search):
        if END in message:
            if message[END] == TIMELINE:
                gather_values(group, runner.spans)
            break
        with be.session():
            logits = runner.run(message)
            if logits is not None:
                found, best = be.host(logits), message["best"]
                group.send(np.ascontiguousarray(found if best is None else packed(found, best)), 0)
    group.close()


@dataclass(eq=False)
class Pending:
    """A submitted pass, with `n_rows` rows of logits; `found` is None until the logits have arrived.

    The last rank sends the `best` largest logits of each row, or all logits if `best` is None.
    """

    n_rows: int
    best: int | None
    found: Array | None = None


class Pipeline(SharedModel):
    """A model whose later layers run on other ranks. With N ranks, up to N passes may be in flight."""

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        super().__init__(model, group, wake)
        self._runner, self._flight = StageRunner(model, group, self._search), deque[Pending]()
        self.n_stages = group.size

    @property
    def kv_layers(self) -> list[CacheLayer]:
        return self._model.whole_kv_layers

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        self.check_unbroken()
        while len(self._flight) >= self._group.size:  # so that the last rank can always send logits without waiting
            self._receive()
        with self.whole_pass():
            message = {**self.message(batch), "best": self._best(batch)}
            self.tell(message)
            logits = self._runner.run(message)
        if not batch.rows:
            return None
        pending = Pending(len(batch.rows), self._best(batch))
        if self._group.size == 1:
            pending.found = logits
        else:
            self._flight.append(pending)
        return lambda: self._logits(pending)

    def _best(self, batch: Batch) -> int | None:
        """Return how many of each row's largest logits are sent; None if all are needed, or if all take fewer bytes."""
        return batch.best if packs(batch.best, int(self.config.vocab_size)) else None

    def _logits(self, pending: Pending) -> Array:
        while pending.found is None:
            self._receive()
        return pending.found

    def settle(self) -> None:
        while self._flight:
            self._receive()

    def _receive(self) -> None:
        """Receive the logits of the oldest pass in flight."""
        self._flight[0].found = self.backend.array(self._next_logits())
        self._flight.popleft()

    def _next_logits(self) -> np.ndarray:
        n, n_rows, best = int(self.config.vocab_size), self._flight[0].n_rows, self._flight[0].best
        shape = (n_rows, n) if best is None else (n_rows, 2, best)
        found = cast(np.ndarray, self._group.receive(shape, np.float32, self._group.previous))
        return found if best is None else unpacked(found[None], n)

    def end(self, *, timeline: bool = False) -> list[list[Span]]:
        while self._flight:
            self._next_logits()
            self._flight.popleft()
        self.tell({END: TIMELINE if timeline else ""})
        gathered = gather_values(self._group, self._runner.spans) if timeline else []
        self._group.close()
        return [[Span(*span) for span in spans] for spans in gathered]


# ---- the split ----

OPTION = "--split"
# The speed of a machine is measured by a gemv with a float32 matrix of N_OUTPUTS x N_INPUTS, 32 MiB. The product is
# repeated for SECONDS, and at least REPETITIONS times. The median is used, because ranks that share a machine disturb
# each other in some repetitions.
N_OUTPUTS, N_INPUTS, SECONDS, REPETITIONS = 2048, 4096, 0.2, 3
# Speeds, relative to the fastest rank, are rounded to powers of 2**STEP (the square root of 2), so that equal machines
# get equal shares in every run.
STEP = 0.5
# The number of cached tokens for which ranks are balanced. A split that is balanced for an empty cache is slow after
# many tokens: the last rank has the head in place of some layers. The head has no keys and values, so the other ranks
# then read more bytes. (In Qwen3 0.6B in Q8_0, a layer's float32 keys and values of 4,096 tokens take twice the bytes
# of its weights.) If two ranks are balanced for 1,024 tokens, they are 1.8 times as fast as one rank, both with an
# empty cache and after 4,096 tokens. This factor was computed from the bytes that the ranks read.
CONTEXT = 1024


class Machine(NamedTuple):
    """The speed of a rank, in bytes of weights per second, and its free memory in bytes."""

    speed: float
    memory: int


def parsed(text: str) -> tuple[int, ...]:
    """Parse the number of layers of each rank, such as `20,8`.

    Raises:
        OptionError: the text has another form.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        message = f"{OPTION}: {shown(text)} is not a list of the layers of each rank, such as 20,8"
        raise OptionError(message, option=OPTION, found=text)
    return tuple(map(int, parts))


def stages_of(counts: Sequence[int], size: int, config: Any) -> list[Stage]:
    """Return the stage of each rank; `counts` has the number of layers of each rank.

    Raises:
        OptionError: the number of ranks or layers is wrong, or a cut separates layers that share keys and values.
    """
    n_layers, text = int(config.n_layers), ",".join(map(str, counts))
    if len(counts) != size or sum(counts) != n_layers:
        message = f"{OPTION}: {text} must be {size} numbers, one for each rank, that add up to {n_layers} layers"
        raise OptionError(message, option=OPTION, found=text)
    ends = np.cumsum(counts).tolist()
    latest = latest_cut(config)
    if wrong := [end for end in ends[:-1] if end > latest]:
        message = (
            f"{OPTION}: layers {latest} to {n_layers - 1} must be on one rank, because some of them share keys and "
            f"values; {text} cuts before layer {wrong[0]}"
        )
        raise OptionError(message, option=OPTION, found=text)
    return [Stage(first, end, n_layers) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def latest_cut(config: Any) -> int:
    """Return the index of the last layer before which a model may be cut.

    This is the first layer whose keys and values later layers share. If no layers share keys and values, return the
    number of layers.
    """
    n_layers, shares = int(config.n_layers), getattr(config, "shares", None)
    owners = [] if shares is None else [shares(i) for i in range(n_layers)]
    return min((owner for owner in owners if owner is not None), default=n_layers)


def layer_bytes(model: ModelParts, n_tokens: int) -> tuple[list[int], int]:
    """Return the bytes of each layer with keys and values of `n_tokens` tokens, and the bytes of the head."""
    caches = [0 if part.kept is None else pool_nbytes([part.kept], n_tokens) for part in model.layers]
    return [held([part]) + nbytes for part, nbytes in zip(model.layers, caches, strict=True)], held([model.head])


def best_split(layers: Sequence[int], head: int, machines: Sequence[Machine], cuts: Collection[int]) -> list[int]:
    """Return the split (the number of layers of each rank) whose slowest rank takes the least time.

    If several splits take the same time, return the most even one.

    The time of a rank is the bytes of its layers, divided by its speed. The last rank also has the bytes of the head.
    Embedding tables do not count, because they stay in the file.

    Args:
        layers: bytes of each layer.
        head: bytes of the head.
        machines: speed and memory of each rank.
        cuts: the indices of the layers that may be the first layer of a rank after rank 0.

    Raises:
        NotEnoughMemoryError: no split fits into the memory of the ranks.
        OptionError: there are more ranks than parts into which the layers can be cut.
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
    """Return the speed and memory of each rank; `measured` has each rank's computer, speed and free memory.

    Ranks on one computer get an equal part of its memory, and the mean of their speeds, because they disturb each
    other's measurements.
    """
    made = []
    for name, _, memory in measured:
        speeds = [speed for of, speed, _ in measured if of == name]
        made.append(Machine(sum(speeds) / len(speeds), memory // len(speeds)))
    return made


def measured_speed(backend: Backend) -> float:
    """Measure the bytes per second of a backend's gemv with a float32 matrix."""
    weight = Weight.pack("speed", np.ones((N_OUTPUTS, N_INPUTS), dtype=np.float32), F32)
    ends = list[float]()
    with backend.session():
        linear, x = Linear("speed", backend.prepare(weight)), backend.as_activations(np.ones((1, N_INPUTS), np.float32))
        began = time.perf_counter()
        while len(ends) < REPETITIONS or ends[-1] - began < SECONDS:
            backend.wait(backend.linear(x, linear))
            ends.append(time.perf_counter())
    backend.discard(linear)
    return weight.nbytes / float(np.median(np.diff([began, *ends])))
