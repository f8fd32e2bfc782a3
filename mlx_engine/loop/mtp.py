"""Speculative decoding with multi-token prediction (MTP): an extra layer of the model proposes the next tokens.

The MTP layer was trained together with the model. Its input is the token at position i and the model's hidden state at
position i - 1, and its output predicts the token at position i + 1. The layer has its own KV pool for the last tokens
of each sequence: at most `READ` tokens of the prompt, and the tokens of the answer. If earlier tokens are missing from
this pool, proposals are less often right, but answers do not change. To propose a further token, the layer reads the
token that it has just proposed, and its own hidden state in place of the model's. The keys and values of proposed
tokens are rolled back afterwards.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.parameters import Token
from mlx_engine.cache import KVPool, KVSequence, SequenceInput
from mlx_engine.loop.request import Sequence
from mlx_engine.loop.speculation import MOST_ROWS, PassCosts, append_choices, begin_fitting
from mlx_engine.options import MTP
from mlx_engine.weights.model import ExtraLayer, Model

# The layer reads at most the last READ tokens of a prompt. At most MOST tokens are proposed for a sequence at once.
READ, MOST = 256, 3


@dataclass(eq=False)
class _Held:
    """The layer's KV cache of a sequence.

    Attributes:
        kv: the KV cache. Its first token is the token at position `start + 1` of the sequence.
        start: the position of the first hidden state of the model that the layer has read.
    """

    kv: KVSequence
    start: int = 0


class NextTokens:
    """A `PassDrafter` that proposes tokens for all sequences of a scheduler, with the MTP layer.

    Args:
        layer: the model's MTP layer and its head.
        pool: the memory for the layer's keys and values.
        share: the assumed time of a pass of layer and head, divided by that of a pass of the model.
    """

    name, most, n_hidden = MTP, MOST, READ

    def __init__(self, model: Model, layer: ExtraLayer, pool: KVPool, share: float) -> None:
        self.pool, self.share = pool, share
        self._backend, self._layer, self.costs = model.backend, layer, PassCosts()
        self._held: dict[Sequence, _Held] = {}

    def propose(self, wanted: Mapping[Sequence, int], budget: int) -> Mapping[Sequence, abc.Sequence[int]]:
        """Return, for each sequence, the ids that the layer predicts after the ids of prompt and answer so far.

        `wanted` maps each sequence to the largest number of ids to propose. `budget`, a bound on the tokens that a
        drafter reads in a call, is ignored, because the layer reads at most the last `READ` tokens of a prompt.
        """
        be, found = self._backend, dict[Sequence, list[Token]]()
        inputs: dict[Sequence, SequenceInput] = {}
        hidden: dict[Sequence, np.ndarray] = {}
        for sequence in wanted:
            part = self._next(sequence)
            if part is not None:
                inputs[sequence], hidden[sequence] = part
                found[sequence] = []
        states = self._run(inputs, hidden, found)
        for sequence in states:
            kv = self._held[sequence].kv
            kv.commit(kv.pending)
            sequence.hidden.clear()
        for k in range(1, max(wanted.values(), default=0)):
            parts = {
                one: SequenceInput(found[one][-1:], self._held[one].kv)
                for one in states
                if len(found.get(one, ())) == k < wanted[one] and _has_room(self._held[one].kv, 1)
            }
            states = self._run(parts, states, found)
        for sequence in found:
            self._held[sequence].kv.roll_back(self._held[sequence].kv.pending)
        return {one: [be.token_id(token) for token in ids] for one, ids in found.items() if ids}

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence, and drop its hidden states."""
        sequence.hidden.clear()
        held = self._held.pop(sequence, None)
        if held is not None:
            held.kv.roll_back(held.kv.pending)
            held.kv.close()

    def _next(self, sequence: Sequence) -> tuple[SequenceInput, np.ndarray] | None:
        """Return the next n tokens for the layer, and the model's hidden states (n, D) one position before each token.

        Return None if the hidden state before the sequence's last token is missing, or if the whole pool is too small
        for the sequence.
        """
        ids, pieces = sequence.ids, list[np.ndarray]()
        first = end = len(ids) - 1  # the last id has not been run
        for start, rows in reversed(sequence.hidden):  # the states before the last id, back to the first gap
            if start + len(rows) != first:
                break
            pieces.insert(0, rows)
            first = start
        if not pieces:
            return None
        rows, held = np.concatenate(pieces), self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(self.pool.sequence())
        if held.start + held.kv.length != first:
            held.kv.close()
        if not held.kv.length:
            first = held.start = max(first, end - READ)
            rows = rows[first - end :]
        if not _has_room(held.kv, end - first):
            return None
        return SequenceInput(ids[first + 1 :], held.kv), rows

    def _run(
        self, inputs: dict[Sequence, SequenceInput], hidden: Mapping[Sequence, np.ndarray],
        found: dict[Sequence, list[Token]],
    ) -> dict[Sequence, np.ndarray]:  # fmt: skip
        """Run a pass of the layer, and append each sequence's chosen token to its list in `found`.

        `hidden` maps each sequence to the hidden states (n, D) one position before each of its n tokens. Return the
        layer's hidden state (1, D) of each sequence's last token.

        If the pool has too few pages for all sequences, `begin_fitting` removes the last sequences from `inputs`. If a
        removed sequence has no proposed token yet, it is also removed from `found`, and its pages are freed.
        """
        all_inputs, batch = list(inputs), begin_fitting(inputs, found)
        for one in all_inputs:
            if one not in found:
                self.release(one)  # also drops the hidden states, so the layer restarts with later tokens
        if batch is None:
            return {}
        be, began, asking = self._backend, time.perf_counter(), list(inputs)
        try:
            logits, states = self._layer.forward(batch, be.array(np.concatenate([hidden[one] for one in asking])))
            append_choices(be, logits, asking, found, self._layer.n_vocabulary)
            of_rows = be.host(states)
        except BaseException:
            batch.roll_back()
            raise
        if len(batch.positions) <= MOST_ROWS:
            self.costs.add(len(asking), time.perf_counter() - began)
        return {one: of_rows[row : row + 1] for row, one in enumerate(asking)}


def _has_room(kv: KVSequence, n: int) -> bool:
    return kv.length + kv.pending + n <= kv.capacity
