"""The search for the first value that is not finite: all ranks run some passes again, and note what each computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from mlx_engine.backends.parameters import Array
from mlx_engine.backends.taps import tapped
from mlx_engine.distributed.agreement import gather_values
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.mirror import Message
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import COUNTED
from mlx_engine.weights.model import FirstFault

# What a pass says that is part of a search, and the message after the last of them.
SEARCH, FOUND = "search", "found"


class Search:
    """One rank's part of searches.

    Args:
        model: this rank's share of the model.
        group: the ranks.
    """

    def __init__(self, model: Decoder, group: Group) -> None:
        self._model, self._group = model, group
        self._twin: Decoder | None = None
        self._n_passes = self._n_values = 0
        # The place of the first such value, by which those of ranks are ordered, and what `FirstFault` has after rank.
        self._first: tuple[list[int], str, list[int]] | None = None

    def model_of(self, message: Message) -> Decoder:
        """Return the model that runs a pass: this rank's share, in a search with operations in their composed form."""
        if SEARCH not in message:
            return self._model
        if self._twin is None:
            self._twin = copy.copy(self._model)
            self._twin.backend = tapped(self._model.backend, self.check)
        self._n_passes += 1
        return self._twin

    def check(self, name: str, x: Array) -> None:
        """Note a value, unless one before was not finite."""
        self._n_values += 1
        if self._first is not None:
            return
        values = self._model.backend.host(x)
        n_bad = int((~np.isfinite(values)).sum())
        if n_bad:
            place = [self._n_passes, self._model.stage.first, self._n_values]
            self._first = place, self._counted(name), [int(np.isnan(values).sum()), n_bad, int(values.size)]

    def end(self) -> FirstFault | None:
        """End the search, and return the first value of all ranks that is not finite. Every rank calls it."""
        found: list[Any] = gather_values(self._group, self._first)
        self._twin, self._first, self._n_passes, self._n_values = None, None, 0, 0
        faults = [(place, rank, name, counts) for rank, of in enumerate(found) if of for place, name, counts in [of]]
        if not faults:
            return None
        place, rank, name, counts = min(faults)
        # A sum over ranks is not finite on all of them.
        is_of_one = [of for of, *_ in faults].count(place) == 1
        return FirstFault(name, rank if is_of_one else None, *counts)

    def _counted(self, name: str) -> str:
        """Return the name of a value with the layer's index in the whole model."""
        block, _, rest = name.partition(".")
        index, _, what = rest.partition(".")
        return f"{block}.{int(index) + self._model.stage.first}.{what}" if what in COUNTED else name
