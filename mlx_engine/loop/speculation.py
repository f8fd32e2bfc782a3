"""Speculative decoding: a pass that computes the next token also checks proposed tokens, so it may give several tokens.

A drafter proposes the next ids of a sequence. The pass runs the answer's newest token, then the proposed ids, and
computes a row of logits for each. The scheduler chooses tokens as it would without proposals, each from the row of the
previous token, until a chosen token differs from the proposed one. This chosen token also belongs to the answer. The
keys, values and states of the wrong proposal and of all later proposals are discarded. So no answer depends on
proposals if the bits of a row do not depend on the other rows of its pass (`fixes_rows`).

The number of proposed tokens is chosen for each pass, so that the expected number of tokens per second is highest. The
estimate uses the measured time of passes by their number of rows, and the share of earlier proposals that were right.
The first proposed token is compared with the next token of the answer even if no pass has run the proposal, so the
share is known before a wrong proposal costs time. Each sequence has a budget in tokens: accepted tokens are added. The
time that proposals added to passes is subtracted, as the number of tokens that passes without proposals would have
given in this time. When the budget is used up, nothing is proposed.

Lookup in earlier text (`lookup.py`) takes hardly any time. A *pass drafter* (`draft.py`, `mtp.py`) runs forward passes
to propose tokens. It is called only for sequences in which its proposals are more likely to be right than those of
lookup.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.cache.pool import LONGEST_PASS, kv_layers
from mlx_engine.errors import CacheFullError
from mlx_engine.loop.request import ScheduledChunk, Sequence
from mlx_engine.observe.log import warn
from mlx_engine.options import AUTO_SPECULATION, DRAFT, LOOKUP, MTP, OFF
from mlx_engine.weights.model import Model

# The largest number of tokens that are proposed for one sequence in a pass, and the largest number of rows of a pass
# with proposed tokens. Up to 32 rows, all layers run in one call of the CPU kernels.
MOST, MOST_ROWS = 15, 32
# The share of right proposals is counted separately for each kind of evidence. Lookup has a kind per range of match
# lengths; each number of LENGTHS, in ids, begins a range. KINDS maps the name of each pass drafter to its kind. PRIOR
# has the share that is assumed for each kind before any proposals are counted.
LENGTHS = (1, 3, 4, 6, 9, 16)
KINDS = {DRAFT: len(LENGTHS), MTP: len(LENGTHS) + 1}
PRIOR = (0.15, 0.3, 0.5, 0.65, 0.8, 0.9, 0.6, 0.7)
# In the estimate of the share in all sequences, PRIOR counts as much as WEIGHT proposals. In the estimate of the share
# in one sequence, the share in all sequences counts as much as SHARED_WEIGHT proposals; with a small SHARED_WEIGHT,
# estimates from few proposals would scatter. After LATEST proposals, the counts are halved, so that later ones count
# more.
WEIGHT, SHARED_WEIGHT, LATEST = 4.0, 32.0, 128
# The budget of a sequence, in tokens (`Draft.budget`), is START at first. Each token of the answer adds PER_TOKEN.
# MOST_SAVED is the largest value of `Draft.account`, the net gain of proposals.
START, PER_TOKEN, MOST_SAVED = 0.75, 0.003, 8.0
# The trust in the proposals of a sequence is a number of tokens, at most MOST_TRUST, that is added to its budget. A
# right first proposed token adds TRUST, a wrong one subtracts DOUBT. Without trust, a wrong proposal at the start of
# an answer that repeats its prompt would prevent proposals for fifty tokens. With eight requests at once, a proposed
# token costs about half a token. So with a smaller MOST_TRUST, a few wrong proposals would stop the proposals of a
# sequence in which nine of ten are right.
MOST_TRUST, TRUST, DOUBT = 4.0, 0.4, 0.8
# Tokens are proposed only if the expected tokens per second are more than MARGIN times those without proposals.
MARGIN = 1.05
# After this number of consecutive passes with proposals, a pass without proposals is run to measure its time.
PLAIN_EACH = 128
# On a lazy backend, a sequence can only get proposals after its last token has reached the host. If the probability of
# a right proposal is at least PROMISING, the sequence waits for this token, which delays its next pass.
PROMISING = 0.5
# The assumed time of a pass (`_usual`) is 1 for the first row, PER_ROW for each further row up to row FOURTH, and
# PER_FURTHER_ROW for each row after it. CPU kernels multiply four rows in about the time of one row, because memory
# bandwidth is the limit; with more rows, arithmetic is the limit.
PER_ROW, PER_FURTHER_ROW, FOURTH = 0.13, 0.18, 4
# The curve of estimated times has a value for each number of rows below CURVE, and is computed again after RENEW new
# measurements. A measured time is averaged with the earlier ones. The weight of the new time is LONGER if it is longer
# than the average so far, otherwise SHORTER.
CURVE, RENEW, LONGER, SHORTER = 2 * MOST_ROWS, 16, 0.1, 0.4
# Lookup proposes a token only if the probability that it and all proposals before it are right is at least LEAST. A
# pass drafter proposes tokens for a sequence only if the probability of one token to be right is at least LEAST.
LEAST = 0.1
# The largest number of ids that a pass drafter reads in a step with several answers; with one answer, LONGEST_PASS.
SHARED = 64
# For models with recurrent states: the number of slots for states of proposed tokens. It is small, because every slot
# takes memory.
MOST_STATES = 8
# For models with fewer parameters, `auto` does not use lookup, because lookup would take 1 % or more of a pass's time.
FEWEST_PARAMETERS = 1 << 28


class Use(NamedTuple):
    """Whether tokens are proposed for a model, the text that is printed about this (`why`), and the drafters' names."""

    is_on: bool
    why: str
    names: tuple[str, ...] = ()


def fixes_rows(model: Model) -> bool:
    """Return whether a row's bits do not depend on the other rows of its pass."""
    return model.backend.fixes_bits and not any(layer.head_dim % 16 for layer in kv_layers(model.kv_layers))


def use_of(model: Model, asked: str, n_parameters: int, own: abc.Sequence[str] = ()) -> Use:
    """Return whether tokens are proposed, and by which drafters.

    `asked` is the value of the option `speculate`, and `own` has the names of the loaded pass drafters.
    """
    be = model.backend
    if asked == OFF:
        return Use(False, "off; --speculate auto or lookup turns it on")
    differs = "" if fixes_rows(model) else f"; on {be.name} a token may differ if two tokens are almost equally likely"
    if asked != AUTO_SPECULATION:
        return Use(True, f"{asked}{differs}", (asked,))
    names = [name for name in own if name == DRAFT or not differs]
    why = _why_no_lookup(model, n_parameters)
    names = names if why else [LOOKUP, *names]
    if not names:
        return Use(False, f"off: {why}")
    return Use(True, f"{', '.join(names)}{differs}", tuple(names))


def _why_no_lookup(model: Model, n_parameters: int) -> str:
    """Return the reason why `auto` does not use lookup; "" if it does."""
    if not fixes_rows(model):
        return f"on {model.backend.name} the bits of this model's results depend on a pass's length"
    if model.is_shared:
        return "the cost of lookup on ranks has not been measured; --speculate lookup turns it on"
    if n_parameters < FEWEST_PARAMETERS:
        return "this model's passes are too short to gain from lookup; --speculate lookup turns it on"
    return ""


class Drafter(Protocol):
    """Proposes tokens for one sequence."""

    def extend(self, ids: abc.Sequence[int]) -> None:
        """Read new ids of the sequence's answer."""

    def propose(self, most: int) -> tuple[abc.Sequence[int], int]:
        """Return at most `most` ids that may follow, and how many of the sequence's last ids matched earlier text."""


class Drafters(Protocol):
    """Makes the drafters of a scheduler's sequences."""

    def __call__(self, sequence: Sequence) -> Drafter:
        """Return the drafter of a sequence whose prompt has been read."""

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has ended."""


class PassDrafter(Protocol):
    """Proposes tokens for several sequences, by forward passes of a draft model or of an MTP layer.

    Attributes:
        name: a key of `KINDS`.
        most: the most tokens that the drafter proposes for a sequence at once.
        costs: the time of a pass of the drafter, by the number of sequences.
        share: the assumed time of a pass of the drafter, divided by the time of a pass of the model. It is used until
            `costs` has a measurement.
        n_hidden: the drafter reads the hidden states of this many last tokens of a sequence.
    """

    name: str
    most: int
    costs: PassCosts
    share: float
    n_hidden: int

    def propose(self, wanted: Mapping[Sequence, int], budget: int) -> Mapping[Sequence, abc.Sequence[int]]:
        """Return the ids that may follow the settled ids (those on the host) of each sequence.

        Args:
            wanted: maps each sequence to the largest number of ids to propose.
            budget: the largest number of settled ids that this call reads, for all sequences together. A sequence gets
                no proposed ids if some of its settled ids are still unread, or if the drafter lacks memory for it.
        """

    def release(self, sequence: Sequence) -> None:
        """Free the memory that is held for a sequence. A later call of `propose` may name the sequence again."""


class Acceptance:
    """How often proposed tokens were right, by the kind of the evidence."""

    def __init__(self) -> None:
        self._right, self._tried = [0.0] * len(PRIOR), [0.0] * len(PRIOR)

    def add(self, kind: int, *, is_right: bool) -> None:
        """Count a proposed token that has been compared with the token of the answer."""
        self._right[kind] += is_right
        self._tried[kind] += 1
        if self._tried[kind] > LATEST:
            self._right[kind] /= 2
            self._tried[kind] /= 2

    def estimate(self, kind: int, before: float, weight: float = WEIGHT) -> float:
        """Return the probability that a proposed token is right; `before`, a prior, counts as `weight` proposals."""
        return (before * weight + self._right[kind]) / (weight + self._tried[kind])

    def lines(self) -> list[str]:
        """Return lines with the share of right tokens for each kind of evidence that occurred."""
        names = [str(low) if high == low + 1 else f"{low} to {high - 1}" for low, high in pairwise(LENGTHS)]
        found = zip([*names, f"{LENGTHS[-1]} or more"], self._right, self._tried, strict=False)
        shares = [f"{name} ids: {right / tried:.0%}" for name, right, tried in found if tried]
        lines = [f"right first tokens by length of the match: {'; '.join(shares)}"] if shares else []
        for name, kind in KINDS.items():
            if self._tried[kind]:
                lines.append(f"right tokens of {name}: {self._right[kind] / self._tried[kind]:.0%}")
        return lines


class PassCosts:
    """The time of a pass by its number of rows, measured while passes run."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._curve, self._n_new = [_usual(n) for n in range(CURVE)], 0

    @property
    def is_known(self) -> bool:
        """Whether a pass has been measured."""
        return bool(self._seconds)

    def lacks(self, n_rows: int) -> bool:
        """Return whether passes have been measured, but none with `n_rows` rows."""
        return self.is_known and n_rows not in self._seconds

    def add(self, n_rows: int, seconds: float) -> None:
        """Add the measured time of a pass without tokens of prompts.

        Other work on the machine makes passes longer, never shorter, so shorter times get more weight than longer ones.
        """
        known, self._n_new = self._seconds.get(n_rows), self._n_new + 1
        if known is None:
            # The time is bounded, because kernels may have been compiled in the first pass with this number of rows.
            self._seconds[n_rows] = min(seconds, 1.5 * self(n_rows)) if self._seconds else seconds
            self._n_new = RENEW
        else:
            self._seconds[n_rows] = known + (LONGER if seconds > known else SHORTER) * (min(seconds, 2 * known) - known)

    def __call__(self, n_rows: int) -> float:
        """Return the estimated time of a pass: in seconds if any pass was measured, else as a multiple of one row."""
        if self._n_new >= RENEW and self._seconds:
            self._curve, self._n_new = [self._estimate(n) for n in range(CURVE)], 0
        return self._curve[n_rows] if n_rows < CURVE else self._curve[-1] * _usual(n_rows) / _usual(CURVE - 1)

    def _estimate(self, n_rows: int) -> float:
        """Return the shortest measured time of passes with `n_rows` or more rows.

        If no pass with `n_rows` rows was measured, scale the estimate of the nearest measured number of rows instead.
        """
        if n_rows in self._seconds:
            return min(seconds for n, seconds in self._seconds.items() if n >= n_rows)
        nearest = min(self._seconds, key=lambda measured: abs(measured - n_rows))
        return self._estimate(nearest) * _usual(n_rows) / _usual(nearest)

    def lines(self) -> list[str]:
        """Return a line with the measured times."""
        times = [f"{n}: {seconds * 1e3:.2f}" for n, seconds in sorted(self._seconds.items())]
        return [f"milliseconds of a pass by rows: {', '.join(times)}"] if times else []


def _usual(n_rows: int) -> float:
    return 1 + PER_ROW * (min(n_rows, FOURTH) - 1) + PER_FURTHER_ROW * max(0, n_rows - FOURTH)


@dataclass(eq=False)
class Draft:
    """The state of speculation in one sequence: its drafter, the ids to propose next, and its budget.

    Attributes:
        drafter: the lookup in earlier text; None if only pass drafters propose tokens.
        n_read: the number of ids of the answer that the drafter has read.
        ids: the proposed ids.
        kind: the kind of evidence for these ids: an index of `LENGTHS`, or a value of `KINDS`.
        acceptance: how often proposals were right in this sequence.
        account: number of tokens that proposals have gained, minus the number of tokens that they have cost.
        trust: number of tokens that is added to the budget, because recent proposals were right.
        under_way: three counts of the last pass that ran proposals of this sequence: its rows without proposals, its
            sequences that could get proposals, and the proposed tokens that `plan` chose for these sequences.
    """

    drafter: Drafter | None
    n_read: int = 0
    ids: abc.Sequence[int] = ()
    kind: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    account: float = 0.0
    trust: float = 0.0
    under_way: tuple[int, int, int] = (0, 0, 1)

    @property
    def source(self) -> str:
        """The name of the drafter that has proposed the ids."""
        return next((name for name, kind in KINDS.items() if kind == self.kind), LOOKUP)

    def budget(self, n_tokens: int) -> float:
        """Return the number of tokens that wrong proposals may cost after `n_tokens` tokens of the answer."""
        return START + PER_TOKEN * n_tokens + self.account + self.trust


class Speculation:
    """Proposes tokens for the sequences of one scheduler, and counts how many of them are right.

    Attributes:
        n_hidden: the largest `n_hidden` of the pass drafters.
        costs: the time of the model's passes.
        n_drafts: number of passes with proposed tokens, counted once for each sequence with proposals.
        n_proposed: number of proposed tokens that passes have run.
        n_accepted: number of proposed tokens that were right.

    Args:
        drafters: makes the drafters that look in earlier text; None if lookup is not used.
        n_vocabulary: the model's vocabulary size; a proposal is cut before the first id that is not below this size.
        passes: the pass drafters, the best first.
        usual: the names of the drafters for requests whose option `speculate` is "auto"; None for all drafters.
    """

    def __init__(
        self,
        drafters: Drafters | None,
        n_vocabulary: int,
        *,
        passes: abc.Sequence[PassDrafter] = (),
        usual: abc.Collection[str] | None = None,
    ) -> None:
        self.drafters, self._n_vocabulary, self.passes = drafters, n_vocabulary, tuple(passes)
        names = [*([] if drafters is None else [LOOKUP]), *(drafter.name for drafter in self.passes)]
        self._usual = frozenset(names if usual is None else usual)
        self.costs, self._acceptance = PassCosts(), Acceptance()
        self.n_drafts = self.n_proposed = self.n_accepted = 0
        self.n_hidden = max((drafter.n_hidden for drafter in self.passes), default=0)
        # The seconds that pass drafters have taken since a pass of the model was last measured.
        self._drafting = 0.0
        # The number of passes with proposals since the last pass without proposals.
        self._n_since = 0
        self._failed = set[str]()

    def propose(
        self, chunks: abc.Sequence[ScheduledChunk], is_settled: Callable[[Sequence], bool], n_pages: int
    ) -> None:
        """Add proposed tokens to the chunks of a pass. A chunk is the tokens of one sequence in a pass.

        Only chunks that continue an answer whose last token is on the host get proposed tokens. Proposals only use free
        pages: no cached page is evicted and no sequence preempted for them. But cached recurrent states are evicted if
        too few slots are free for the states of proposed tokens.

        Args:
            chunks: all chunks of the pass.
            is_settled: returns whether the ids of all tokens of a sequence are on the host.
            n_pages: number of pages that the pass takes, without proposals, for the layers without a window.
        """
        n_since, self._n_since = self._n_since, 0
        asking = [chunk for chunk in chunks if _may_ask(chunk) and is_settled(chunk.sequence)]
        if not asking:
            return
        drafts = [self.look(chunk.sequence) for chunk in asking]
        n_rows, n_slots = sum(chunk.n for chunk in chunks), 2 * len(chunks)
        # If the time of a pass without proposals must be measured, propose nothing. Passes with tokens of prompts are
        # not measured.
        if n_rows == len(chunks) and (self.costs.lacks(n_rows) or n_since >= PLAIN_EACH):
            return
        for drafter in self.passes:
            self._draft(drafter, asking, drafts, n_rows)
        if not any(draft.ids for draft in drafts):
            return
        numbers = self.plan(asking, drafts, n_rows)
        under_way = n_rows, len(asking), sum(numbers)
        for chunk, draft, n in zip(asking, drafts, numbers, strict=True):
            n = _fitting(chunk, n, n_pages, n_slots)
            if n:
                n_pages += chunk.sequence.n_pages(1 + n) - chunk.sequence.n_pages(1)
                n_slots += n
                self._n_since = n_since + 1
                draft.under_way = under_way
                chunk.proposed, chunk.drafter = draft.ids[:n], draft.source
                chunk.n = chunk.n_wanted = 1 + n

    def plan(self, chunks: abc.Sequence[ScheduledChunk], drafts: abc.Sequence[Draft], n_rows: int) -> list[int]:
        """Return the number of tokens to propose for each chunk, so that the expected tokens per second are highest."""
        n, numbers = len(chunks), [0] * len(chunks)
        chances = [self.probability(draft) if draft.ids else 0.0 for draft in drafts]
        if max(chances) < LEAST:
            return numbers
        each = self._extra(n_rows, n, 4) / 4
        likely: list[tuple[float, int]] = []
        for i, (chunk, draft, chance) in enumerate(zip(chunks, drafts, chances, strict=True)):
            budget = draft.budget(len(chunk.sequence.output.token_ids))
            right, most = 1.0, int(budget / each) if each else len(draft.ids)
            for _ in range(min(len(draft.ids), most)):
                right *= chance
                if right < LEAST:
                    break
                likely.append((right, i))
        likely.sort(key=lambda one: -one[0])
        expected, best, n_best = float(n), MARGIN * n / self.costs(n_rows), 0
        for r, (right, _) in enumerate(likely[: max(0, MOST_ROWS - n_rows)], start=1):
            expected += right
            rate = expected / self.costs(n_rows + r)
            if rate > best:
                best, n_best = rate, r
        for _, i in likely[:n_best]:
            numbers[i] += 1
        return numbers

    def look(self, sequence: Sequence) -> Draft:
        """Return the draft of a sequence, with lookup's proposals after its settled ids.

        If the sequence has new ids, first count whether the first proposed id equals the first new id.
        """
        draft = sequence.draft
        if draft is None:
            is_lookup = self.drafters is not None and self._may_use(LOOKUP, sequence)
            draft = sequence.draft = Draft(self.drafters(sequence) if is_lookup and self.drafters else None)
        ids = sequence.output.token_ids
        if len(ids) == draft.n_read:
            return draft
        if draft.ids:
            is_right = ids[draft.n_read] == draft.ids[0]
            self._count(draft, draft.kind, is_right=is_right)
            draft.trust = min(MOST_TRUST, draft.trust + TRUST) if is_right else max(0.0, draft.trust - DOUBT)
        most, strength, draft.ids = self._most_of(sequence), 0, ()
        if draft.drafter is not None:
            draft.drafter.extend(ids[draft.n_read :])
            found, strength = draft.drafter.propose(most)
            draft.ids = self._known(found[:most])
        draft.n_read, draft.kind = len(ids), max(0, bisect_right(LENGTHS, strength) - 1)
        return draft

    def probability(self, draft: Draft, kind: int | None = None) -> float:
        """Return the probability that a proposed token with evidence of `kind`, or of the draft's kind, is right."""
        kind = draft.kind if kind is None else kind
        return draft.acceptance.estimate(kind, self._acceptance.estimate(kind, PRIOR[kind]), SHARED_WEIGHT)

    def is_promising(self, sequence: Sequence) -> bool:
        """Return whether a sequence should wait for its last token, because a proposal after it is likely right."""
        draft = self.look(sequence)
        if len(draft.ids) > 1 and self.probability(draft) >= PROMISING:
            return True
        kinds = [KINDS[drafter.name] for drafter in self.passes if self._may_use(drafter.name, sequence)]
        return any(self.probability(draft, kind) >= PROMISING for kind in kinds) and draft.account > -START

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has ended, so that other sequences may look up its text."""
        if self.drafters is not None and self._may_use(LOOKUP, sequence):
            self.drafters.end(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the memory that drafters hold for a sequence, because the sequence has ended or was preempted."""
        for drafter in self.passes:
            drafter.release(sequence)

    def depths(
        self, drafter: PassDrafter, asking: abc.Sequence[tuple[Sequence, Draft]], n_sequences: int, n_rows: int
    ) -> list[int]:
        """Return for each sequence of `asking` how many tokens a pass drafter should propose.

        With these numbers, the expected tokens per second are highest; all are 0 if no proposal gains.

        Args:
            drafter: the pass drafter.
            asking: pairs of a sequence and its draft. Sequences that have other proposals at least as likely to be
                right are left out.
            n_sequences: the number of sequences of the model's pass that may get proposals.
            n_rows: the number of rows of the model's pass without proposals.
        """
        kind, n, plain = KINDS[drafter.name], len(asking), self.costs(n_rows)
        cost = drafter.costs(n) if drafter.costs.is_known else drafter.share * plain
        each = self._extra(n_rows, n_sequences, 4) / 4 + n_sequences * cost / plain / n
        chances = [self.probability(draft, kind) for _, draft in asking]
        caps = []
        for (sequence, draft), chance in zip(asking, chances, strict=True):
            budget = draft.budget(len(sequence.output.token_ids))
            most = min(drafter.most, self._most_of(sequence), int(budget / each) if each else drafter.most)
            caps.append(max(0, most) if chance >= LEAST else 0)
        expected, best, depth = float(n_sequences), MARGIN * n_sequences / plain, 0
        for k in range(1, max(caps) + 1):
            expected += sum(chance**k for chance, cap in zip(chances, caps, strict=True) if cap >= k)
            rows = n_rows + sum(min(cap, k) for cap in caps)
            if rows > MOST_ROWS:
                break
            rate = expected / (self.costs(rows) + k * cost)
            if rate > best:
                best, depth = rate, k
        return [min(cap, depth) for cap in caps]

    def _draft(
        self, drafter: PassDrafter, chunks: abc.Sequence[ScheduledChunk], drafts: abc.Sequence[Draft], n_rows: int
    ) -> None:
        """If a gain is expected, call a pass drafter for some sequences, and keep its proposals in their drafts.

        Sequences that have other proposals at least as likely to be right are left out.
        """
        kind = KINDS[drafter.name]
        asking = [
            (chunk.sequence, draft)
            for chunk, draft in zip(chunks, drafts, strict=True)
            if self._may_use(drafter.name, chunk.sequence)
            and not (draft.ids and self.probability(draft) >= self.probability(draft, kind))
        ]
        if not asking or not self.costs.is_known:
            return
        numbers = self.depths(drafter, asking, len(chunks), n_rows)
        wanted = {sequence: n for (sequence, _), n in zip(asking, numbers, strict=True) if n}
        if not wanted:
            return
        began, budget = time.perf_counter(), LONGEST_PASS if len(chunks) == 1 else SHARED
        try:
            found = drafter.propose(wanted, budget)
        except Exception as error:  # answers do not need proposals, so no request fails
            self._stop(drafter, wanted, error)
            found = {}
        seconds = time.perf_counter() - began
        self._drafting += seconds
        if drafter.costs.is_known:  # limit the time: the drafter may have read prompts, too
            seconds = min(seconds, 2 * max(wanted.values()) * drafter.costs(len(wanted)))
        cost = len(chunks) * seconds / self.costs(n_rows) / max(1, len(found))
        for sequence, draft in asking:
            ids = self._known(found.get(sequence, ()))[: self._most_of(sequence)]
            if ids:
                draft.ids, draft.kind = ids, kind
                draft.account -= cost

    def measure(self, n_rows: int, seconds: float, *, is_decode: bool) -> None:
        """If all rows of a step continued answers (`is_decode`), record the step's time minus that of drafters."""
        seconds, self._drafting = seconds - self._drafting, 0.0
        if is_decode and seconds > 0:
            self.costs.add(n_rows, seconds)

    def learn(self, chunk: ScheduledChunk) -> None:
        """Count the proposed tokens of a chunk whose tokens have been chosen."""
        draft, n, n_right = chunk.sequence.draft, len(chunk.proposed), chunk.n - 1
        if draft is None:
            return
        request = chunk.sequence.request
        counts = request.drafters.setdefault(chunk.drafter, [0, 0])
        counts[0] += n
        counts[1] += n_right
        self.n_drafts += 1
        self.n_proposed += n
        self.n_accepted += n_right
        request.n_proposed += n
        request.n_accepted += n_right
        cost = self._extra(*draft.under_way) * n / draft.under_way[-1]
        draft.account = min(MOST_SAVED, draft.account + n_right - cost)
        # The first proposed token is counted by `look`.
        for i in range(1, min(n, n_right + 1)):
            self._count(draft, draft.kind, is_right=i < n_right)

    def report(self) -> list[str]:
        """Return lines about the number of proposed tokens, the share of right ones, and the time of passes."""
        drafts = f"{self.n_proposed:,} tokens proposed in {self.n_drafts:,} passes, {self.n_accepted:,} accepted"
        rates = self._acceptance.lines()
        costs = self.costs.lines()
        for drafter in self.passes:
            costs += [f"{line}, of {drafter.name} by sequences" for line in drafter.costs.lines()]
        return [f"Speculation: {drafts}", *(f"  {line}" for line in (*rates, *costs))]

    def _stop(self, drafter: PassDrafter, sequences: abc.Iterable[Sequence], error: Exception) -> None:
        """Stop using a pass drafter that has failed, and free the memory that it holds for these sequences."""
        self._failed.add(drafter.name)
        warn(f"the drafter '{drafter.name}' has failed ({type(error).__name__}: {error}); it proposes no more tokens")
        for sequence in sequences:
            with suppress(Exception):  # the drafter may fail again
                drafter.release(sequence)

    def _may_use(self, name: str, sequence: Sequence) -> bool:
        """Return whether a request allows a drafter to propose tokens, and the drafter has not failed."""
        if name in self._failed:
            return False
        asked = sequence.request.options.speculate
        return name in self._usual if asked == AUTO_SPECULATION else asked == name

    def _most_of(self, sequence: Sequence) -> int:
        """Return how many tokens may be proposed: MOST, or fewer if the answer would exceed its token limit."""
        return max(0, min(MOST, sequence.output.max_tokens - len(sequence.output.token_ids) - 1))

    def _count(self, draft: Draft, kind: int, *, is_right: bool) -> None:
        self._acceptance.add(kind, is_right=is_right)
        draft.acceptance.add(kind, is_right=is_right)

    def _known(self, ids: abc.Sequence[int]) -> abc.Sequence[int]:
        """Return the ids before the first id that is not in the vocabulary."""
        if not ids or (min(ids) >= 0 and max(ids) < self._n_vocabulary):
            return ids
        return ids[: next(i for i, one in enumerate(ids) if not 0 <= one < self._n_vocabulary)]

    def _extra(self, n_rows: int, n_sequences: int, n: int) -> float:
        """Return the cost of n more rows: the tokens that passes without these rows would give in the added time."""
        return n_sequences * max(0.0, self.costs(n_rows + n) / self.costs(n_rows) - 1) if n_rows else 0.0


def begin_fitting(inputs: dict[Sequence, SequenceInput], found: dict[Sequence, list[Token]]) -> Batch | None:
    """Begin a drafter's pass over `inputs`. Remove the last sequences until the pool has pages for the others.

    A removed sequence without a proposed token is also removed from `found`. Return None if no sequence is left.
    """
    while inputs:
        try:
            return begin(list(inputs.values()))
        except CacheFullError:
            last, _ = inputs.popitem()
            if not found.get(last, True):
                del found[last]
    return None


def append_choices(
    be: Backend,
    logits: Array,
    asking: abc.Sequence[Sequence],
    found: Mapping[Sequence, list[Token]],
    n_vocabulary: int,
) -> None:
    """Choose a token from each row of a drafter's logits, and append it to the list of the row's sequence in `found`.

    The logits are (R, `n_vocabulary`), and `asking` has the sequence of each row. Rows that are not finite are skipped.
    """
    bad = be.bad_rows(logits, be.row_sums(logits))
    rows = [row for row in range(len(asking)) if row not in bad]
    draws = [asking[row].sampler.guess(found[asking[row]], n_vocabulary) for row in rows]
    tokens = be.choose(be.take(logits, tuple(rows)) if bad else logits, draws) if rows else []
    for row, token in zip(rows, tokens, strict=True):
        found[asking[row]].append(token)


def speculation_of(counts: abc.Iterable[Mapping[str, abc.Sequence[int]]]) -> dict[str, object]:
    """Return a report on the drafters of requests, from the numbers of proposed and accepted tokens per drafter."""
    added: dict[str, dict[str, int]] = {}
    for of_request in counts:
        for name, (n_proposed, n_right) in of_request.items():
            of = added.setdefault(name, {"proposed": 0, "accepted": 0})
            of["proposed"] += n_proposed
            of["accepted"] += n_right
    totals = {key: sum(of[key] for of in added.values()) for key in ("proposed", "accepted")}
    return {"drafter": "+".join(added), **totals, "drafters": added}


def _may_ask(chunk: ScheduledChunk) -> bool:
    """Return whether a chunk runs one token of an answer, and the answer's limit allows at least two more tokens."""
    output = chunk.sequence.output
    goes_on = chunk.n == 1 and len(chunk.samplers) == 1 and not chunk.n_read and bool(output.token_ids)
    return goes_on and output.max_tokens - len(output.token_ids) > 1


def _fitting(chunk: ScheduledChunk, n: int, n_pages: int, n_slots: int) -> int:
    """Return how many of n proposed tokens fit into the pool if `n_pages` pages and `n_slots` state slots are taken."""
    sequence, pool = chunk.sequence, chunk.sequence.kv.pool
    n, n_plain = min(n, pool.longest_pass - 1), sequence.n_pages(1)
    free = [pool.free_pages(group) for group, window in enumerate(pool.windows) if window is None]
    while n and free and sequence.n_pages(1 + n) - n_plain > min(free) - n_pages:
        n -= 1
    if n and pool.states.n_slots and not pool.states.make_room(n_slots + n):
        n = max(0, pool.states.n_free - n_slots)
    return n
