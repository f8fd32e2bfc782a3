"""Speculative decoding with a draft model: a small model with the same vocabulary proposes the next tokens.

The draft model has its own KV pool. For each sequence, the pool has the keys and values of the settled ids (the prompt,
and the ids that are certainly part of the answer) and of the proposed ids. Proposed ids are pending until the large
model has checked them, and are then committed or rolled back. If the draft model has recurrent states, these are
committed or rolled back, too. All sequences share the passes of the draft model. For each sequence, the first pass
reads the new settled ids and gives the first proposed token, and each later pass gives one more proposed token.

The draft model samples with the random numbers of the large model, so that both models often choose the same token. If
the draft model's KV pool has too few pages for a sequence, no tokens are proposed for this sequence.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_engine.backends.parameters import Token
from mlx_engine.cache import KVPool, KVSequence, SequenceInput
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.errors import OptionError
from mlx_engine.loop.forward import wanted_logits
from mlx_engine.loop.request import Sequence
from mlx_engine.loop.speculation import MOST_ROWS, PassCosts, append_choices, begin_fitting
from mlx_engine.options import DRAFT
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.weights.model import Model

# The largest number of tokens that the draft model proposes for a sequence at once. The pool of a draft model with
# recurrent states stores the state after each of these tokens.
MOST = 8


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that every id is the same token in both models. One model may have additional ids without text.

    Raises:
        OptionError: an id has different texts in the two models; the message names the first such id.
    """
    pieces = [tokenizer.pieces() for tokenizer in (target, draft)]
    n = max(map(len, pieces))
    for i, (one, other) in enumerate(zip(*(of + [b""] * (n - len(of)) for of in pieces), strict=True)):
        if one != other:
            message = (
                f"draft must have the model's vocabulary: token {i:,} is {_shown(one)} in {target.where} and "
                f"{_shown(other)} in {draft.where}; choose a smaller model of the same family"
            )
            raise OptionError(message, option="draft", expected=_shown(one), found=_shown(other))


def _shown(piece: bytes) -> str:
    return repr(piece.decode(errors="backslashreplace")) if piece else "no token"


@dataclass(eq=False)
class _Held:
    """The draft model's KV cache of a sequence, and the proposed ids that are pending in this cache."""

    kv: KVSequence
    pending: list[int] = field(default_factory=list)


class DraftModel:
    """A `PassDrafter` that proposes tokens for all sequences of a scheduler, with a draft model.

    Attributes:
        prefix: the draft model's own prefix cache.

    Args:
        pool: the draft model's KV pool, made for as many sequences as the scheduler runs at the same time. If the draft
            model has recurrent states, the pool also has room for the states after proposed tokens.
        share: the number of parameters of the draft model, divided by that of the large model. Until a pass of the
            draft model has been measured, its time is assumed to be `share` times that of the large model.
        whole_pages: whether the prefix cache keeps and reuses only full pages.
    """

    name, most, n_hidden = DRAFT, MOST, 0

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        share: float,
        *,
        whole_pages: bool = False,
    ) -> None:
        self.model, self.pool, self.share = model, pool, share
        self.prefix, self.costs = PrefixCache(pool, whole_pages=whole_pages), PassCosts()
        self._held: dict[Sequence, _Held] = {}

    def propose(self, wanted: Mapping[Sequence, int], budget: int) -> Mapping[Sequence, abc.Sequence[int]]:
        """Return, for each sequence, the ids that the draft model chooses after the settled ids.

        `wanted` maps each sequence to the largest number of ids to propose. In this call, the draft model reads at
        most `budget` settled ids, of all sequences together.
        """
        found: dict[Sequence, list[Token]] = {}
        inputs: dict[Sequence, SequenceInput] = {}
        for sequence, n in wanted.items():
            part = self._next(sequence, budget)
            if part is not None:
                budget -= len(part.ids)
                inputs[sequence] = part
                found.update({sequence: []} if n and part.wanted else {})
        self._run(inputs, found)
        for sequence in inputs:
            self._keep(sequence, len(inputs[sequence].ids))
        for k in range(1, max(wanted.values(), default=0)):
            more = {one: self._held[one].kv for one, ids in found.items() if len(ids) == k < wanted[one]}
            parts = {
                one: SequenceInput(found[one][-1:], kv, each=True)
                for one, kv in more.items()
                if kv.length + kv.pending < kv.capacity
            }
            self._run(parts, found)
        token_id = self.model.backend.token_id
        proposals = {one: [token_id(token) for token in ids] for one, ids in found.items() if ids}
        for sequence, ids in proposals.items():
            held = self._held[sequence]
            held.pending = ids[: held.kv.pending]
        return proposals

    def release(self, sequence: Sequence) -> None:
        """Add the keys and values of a sequence to the prefix cache, and free the other pages of the sequence."""
        held = self._held.pop(sequence, None)
        if held is None:
            return
        self._settle(held, sequence.ids)
        self.prefix.insert(sequence.ids[: held.kv.length], held.kv)
        held.kv.close()

    def _next(self, sequence: Sequence, budget: int) -> SequenceInput | None:
        """Return the settled ids that the draft model runs next, at most `budget`.

        Return None if there are no such ids, or if the draft model cannot run them: the sequence is too long, or an id
        is not in the draft model's vocabulary.
        """
        ids, held = sequence.ids, self._held.get(sequence)
        config = self.model.config
        longest = min(int(config.context_length), self.pool.n_tokens, sequence.request.longest + MOST)
        if len(ids) > longest:  # more ids than the draft model can read
            self.release(sequence)
            return None
        if held is None:
            held = self._held[sequence] = _Held(self.pool.sequence(longest))
            self.prefix.attach(held.kv, ids, len(ids) - 1)
        self._settle(held, ids)
        new = ids[held.kv.length : held.kv.length + budget]
        if not new or max(new) >= int(config.vocab_size):
            return None
        return SequenceInput(new, held.kv, wanted=int(held.kv.length + len(new) == len(ids)))

    @staticmethod
    def _settle(held: _Held, ids: abc.Sequence[int]) -> None:
        """Commit the pending ids that became part of the answer, and roll back the others.

        If the last id of the sequence is pending, it is always rolled back: it is run again, because its logits give
        the next proposal.
        """
        kv, n = held.kv, 0
        following = ids[kv.length : len(ids) - 1]
        while n < min(len(held.pending), len(following)) and held.pending[n] == following[n]:
            n += 1
        kv.roll_back(kv.pending - n)
        kv.commit(n)
        held.pending = []

    def _keep(self, sequence: Sequence, n: int) -> None:
        """Commit the n settled ids that a pass has run. If n is large, as in a prompt, add them to the prefix cache."""
        kv = self._held[sequence].kv
        kv.commit(kv.pending)
        if n > MOST + 1:
            self.prefix.insert(sequence.ids[: kv.length], kv)

    def _run(self, inputs: dict[Sequence, SequenceInput], found: dict[Sequence, list[Token]]) -> None:
        """Run a pass over `inputs`, and append each sequence's chosen token to its list in `found`.

        If the pool has too few pages for all sequences, the last sequences are removed from `inputs`, and, if they have
        no proposed token yet, from `found`.
        """
        batch = begin_fitting(inputs, found)
        if batch is None:
            return
        began, asking = time.perf_counter(), [one for one, part in inputs.items() if part.wanted]
        be = self.model.backend
        try:
            logits = self.model.forward(batch)
            if asking:
                append_choices(be, wanted_logits(logits), asking, found, int(self.model.config.vocab_size))
            else:
                be.wait(self.pool.stores.arrays)
        except BaseException:
            batch.roll_back()
            raise
        if len(batch.positions) <= MOST_ROWS and len(asking) == len(inputs):
            self.costs.add(len(inputs), time.perf_counter() - began)
