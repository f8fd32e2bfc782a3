"""Pipeline: each rank runs some layers of every forward pass, and hidden states travel from rank to rank.

Rank 0 embeds the tokens and begins each pass. The last rank computes logits, which travel back to rank 0. While later
ranks run a pass, rank 0 begins others, of other sequences or of the next tokens of a prompt. If the samplers need the
largest logits alone, no others travel. Every rank runs passes in
the order in which rank 0 begins them, so that the sums of each pass are those of one process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.best import packed, packs, unpacked
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer
from mlx_engine.distributed.agreement import gather_values
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import END, SharedModel, messages, nothing
from mlx_engine.distributed.mirror import Message, Replica
from mlx_engine.distributed.search import FOUND, Search
from mlx_engine.distributed.timeline import MOST_SPANS, Span
from mlx_engine.models.decoder import Decoder

# What the end says if the ranks are to report when they computed.
TIMELINE = "timeline"


class StageRunner:
    """A rank's part of each pass.

    Attributes:
        spans: when this rank computed its part of each pass.
    """

    def __init__(self, model: Decoder, group: Group, search: Search) -> None:
        self._model, self._group, self._search, self.spans = model, group, search, list[Span]()
        self._replica = Replica(model.backend, model.kv_layers, model.stage.first)
        own = model.layers[0].input
        # The width of hidden states, and of the inputs of this rank's layers and of all layers after them.
        n_inputs = own.columns[1] - own.columns[0] if own is not None else 0
        stage = model.stage
        self._hidden, self._own = int(model.config.hidden_size), (stage.end - stage.first) * n_inputs
        self._width = self._hidden + (stage.n_layers - stage.first) * n_inputs

    def run(self, message: Message) -> Array | None:
        """Run this rank's layers of a pass. Return logits (R, V) on the last rank, if any are wanted; else None.

        The other ranks send the hidden states (T, ...) to the next one.
        """
        model, stage = self._search.model_of(message), self._model.stage
        be = model.backend
        batch, began = self._replica.apply(message), time.time()
        if stage.is_first:
            x = be.note("embed", model.embed(batch.ids, batch.positions))
        else:
            x = be.array(self._group.receive((len(batch.positions), self._width), np.float32, self._group.previous))
            began = time.time()
        rest = None
        if self._width > self._hidden + self._own:  # later layers have inputs of their own
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
            be.wait(batch.stores.arrays)  # nobody asks for y
            return None
        logits = be.note("output", model.head(y))
        be.wait(logits)
        return logits

    def _note(self, batch: Batch, began: float) -> None:
        """Keep the times of the latest parts."""
        number = self.spans[-1].number + 1 if self.spans else 0
        self.spans.append(Span(number, len(batch.positions), began, time.time()))
        if len(self.spans) >= 2 * MOST_SPANS:
            del self.spans[:MOST_SPANS]


def follow(model: Decoder, group: Group, sleep: Callable[[], None] = nothing) -> None:
    """Run this rank's part of every pass that rank 0 begins, until rank 0 ends the run.

    Args:
        model: this rank's layers.
        group: the ranks.
        sleep: waits until rank 0 has work again.
    """
    search = Search(model, group)
    runner, be = StageRunner(model, group, search), model.backend
    for message in messages(group, sleep):
        if message.get(END) == TIMELINE:
            gather_values(group, runner.spans)
        if END in message:
            break
        if FOUND in message:
            search.end()
            continue
        with be.session():
            logits = runner.run(message)
            if logits is not None:
                found, best = be.host(logits), message["best"]
                group.send(np.ascontiguousarray(found if best is None else packed(found, best)), 0)
    group.close()


class Pending:
    """A pass that has begun, whose logits have perhaps not arrived.

    Attributes:
        n_rows: rows of logits.
        best: how many of the largest logits of a row the last rank sends; None for all.
        found: the logits.
    """

    def __init__(self, n_rows: int, best: int | None) -> None:
        self.n_rows, self.best = n_rows, best
        self.found: Array | None = None


class Pipeline(SharedModel):
    """A model whose later layers other ranks run: as many passes may be under way as there are ranks."""

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        super().__init__(model, group, wake)
        self._runner, self._flight = StageRunner(model, group, self._search), deque[Pending]()
        self.n_stages = group.size

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """What each layer of the whole model keeps of a sequence."""
        return self._model.whole_kv_layers

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        self.check_unbroken()
        while len(self._flight) >= self._group.size:  # the last rank waits if nobody receives its logits
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
        """Return how many of the largest logits of a row travel; None for all, if they are fewer bytes."""
        return batch.best if packs(batch.best, int(self.config.vocab_size)) else None

    def _logits(self, pending: Pending) -> Array:
        while pending.found is None:
            self._receive()
        return pending.found

    def settle(self) -> None:
        while self._flight:
            self._receive()

    def _receive(self) -> None:
        """Receive the logits of the oldest pass under way."""
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
